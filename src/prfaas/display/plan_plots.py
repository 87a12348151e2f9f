"""Figures 2, 5a and 5b of the paper for any deployment, a map of its gain, and a sweep's figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.catalog import Catalog
from prfaas.config import Deployment
from prfaas.display.figure import BLUE, GREEN, GREY, ORANGE, RED, make_folder, pyplot, save
from prfaas.display.gain_map_plot import plot_gain_map
from prfaas.kvspec import KVSpec
from prfaas.planner.comparison import DeploymentComparison, Planner
from prfaas.planner.equations import eq1_kv_throughput_bps
from prfaas.planner.instance_times import prefill_profile
from prfaas.planner.problem import Problem
from prfaas.planner.profile import PrefillProfile
from prfaas.planner.shown_curves import split_curve, threshold_curve
from prfaas.studies.gain_map import deployment_map
from prfaas.studies.problem_files import Study
from prfaas.studies.sweep import SweepPoint

DENSE_REFERENCE = "minimax-m2.5"  # the paper's Figure 2


def plan_plots(
    folder: Path,
    study: Study,
    deployment: Deployment,
    plan: DeploymentComparison,
    sweep: str | None,
    points: Sequence[SweepPoint],
) -> list[Path]:
    """Writes the figures of this plan. Returns the files."""
    make_folder(folder)
    problem = study.problem(deployment)
    planner = study.planner(problem)
    written = [
        _figure_2(folder, study.catalog(deployment), deployment.model.name, problem),
        _figure_5a(folder, planner, problem, plan),
    ]
    if plan.prfaas_pd.threshold_tokens is not None:
        written.append(_figure_5b(folder, planner, problem, plan))
    if problem.remotes:
        gains = deployment_map(study, deployment, plan.reading, fine=True)
        written.append(plot_gain_map(folder, gains, _title(deployment)))
    if sweep:
        written.append(_sweep(folder, sweep.partition("=")[0], points))
    return written


def _title(deployment: Deployment) -> str:
    clusters = [f"{c.gpus} x {c.accelerator} ({c.kind})" for c in deployment.clusters]
    return f"{deployment.model.name} on {' and '.join(clusters)}"


def _figure_2(folder: Path, catalog: Catalog, name: str, problem: Problem) -> Path:
    """KV throughput over input length: the deployment's model beside a dense one."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    dense = catalog.profile(DENSE_REFERENCE, "h200", 8)
    if dense is not None:
        spec = catalog.model(DENSE_REFERENCE).spec()
        title = catalog.model(DENSE_REFERENCE).display_name
        _throughput(axes, spec, prefill_profile(catalog, dense), f"{title} (dense), 8 x h200", RED)
    pool = problem.remotes[0].pool if problem.remotes else problem.local.pool
    label = f"{name}, {pool.gpus_per_instance} x {pool.accelerator}"
    _throughput(axes, problem.spec, pool.profile, label, BLUE)
    axes.set(xscale="log", xlabel="input length (tokens)", ylabel="Phi_kv (Gbps)", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("KV throughput of one prefill instance (eq. 1)")
    axes.legend()
    return save(figure, folder / "fig2_kv_throughput.png")


def _throughput(axes: Any, spec: KVSpec, profile: PrefillProfile, label: str, colour: str) -> None:
    low, high = profile.measured_range
    lengths = np.geomspace(low, high, 200)
    kv_bytes = spec.growing_bytes(lengths) + spec.closing_bytes(lengths)
    phi = np.asarray(eq1_kv_throughput_bps(kv_bytes, profile.seconds(lengths))) / 1e9
    axes.plot(lengths, phi, color=colour, label=label)
    known = [point for point in profile.points if point.cached_tokens == 0]
    at = [spec.kv_bytes(point.new_tokens) * 8e-9 / point.seconds for point in known]
    axes.plot([point.new_tokens for point in known], at, "o", color=colour)


def _figure_5a(
    folder: Path, planner: Planner, problem: Problem, plan: DeploymentComparison
) -> Path:
    """Lambda_max over the split, at the chosen threshold."""
    best = plan.prfaas_pd
    curve = split_curve(problem, planner.curves, best)
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    axes.plot(curve.n_prefill, curve.prefill_rps, "-", color=BLUE, label="prefill")
    axes.plot(curve.n_prefill, curve.decode_rps, "-", color=ORANGE, label="decode")
    axes.plot(curve.n_prefill, curve.lambda_max_rps, "o-", color=GREEN, label="Lambda_max")
    axes.plot(best.n_prefill, best.lambda_max_rps, "*", color=RED, markersize=16)
    axes.set(xlabel="N_p, local prefill instances", ylabel="requests/s")
    axes.set_title(
        f"Split: best N_p = {best.n_prefill}, N_d = {best.n_decode}, "
        f"Lambda_max = {best.lambda_max_rps:.2f}"
    )
    axes.legend()
    return save(figure, folder / "fig5a_split.png")


def _figure_5b(
    folder: Path, planner: Planner, problem: Problem, plan: DeploymentComparison
) -> Path:
    """The two producers' bounds over the threshold, at the chosen split."""
    best = plan.prfaas_pd
    curve = threshold_curve(problem, planner.curves, best)
    assert curve is not None and best.threshold_tokens is not None
    tokens = curve.threshold_tokens
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    axes.plot(tokens, curve.prfaas_rps, color=BLUE, label="Theta_prfaas / p")
    axes.plot(tokens, curve.pd_p_rps, color=ORANGE, label="Theta_pd-p / (1 - p)")
    axes.axhline(curve.pd_d_rps, color=GREY, linestyle="--", label="Theta_pd-d")
    axes.plot(best.threshold_tokens, best.lambda_max_rps, "*", color=RED, markersize=16)
    axes.set(xlabel="threshold t (tokens)", ylabel="sustained arrivals (requests/s)")
    axes.set_ylim(0, 3 * best.lambda_max_rps)
    axes.set_title(
        f"Threshold: best t = {best.threshold_tokens:,}, Lambda_max = {best.lambda_max_rps:.2f}"
    )
    axes.legend()
    return save(figure, folder / "fig5b_threshold.png")


def _sweep(folder: Path, key: str, points: Sequence[SweepPoint]) -> Path:
    numeric = all(isinstance(point.value, int | float) for point in points)
    at = [point.value if numeric else str(point.value) for point in points]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(6.4, 6.0), sharex=True)
    for name, colour in (("prfaas_pd", BLUE), ("homogeneous", GREY), ("naive", ORANGE)):
        solutions = [getattr(point.plan, name) for point in points]
        if all(solution is not None for solution in solutions):
            rps = [solution.lambda_max_rps for solution in solutions]
            top.plot(at, rps, "o-", color=colour, label=name)
    top.set(ylabel="Lambda_max (requests/s)", ylim=(0, None))
    top.legend()
    thresholds = [point.plan.prfaas_pd.threshold_tokens or 0 for point in points]
    bottom.plot(at, thresholds, "o-", color=BLUE)
    bottom.set(xlabel=key, ylabel="best threshold (tokens)", ylim=(0, None))
    values = [point.value for point in points]
    if numeric and min(values) > 0 and max(values) / min(values) > 20:
        bottom.set_xscale("log")
    top.set_title(f"Re-optimised over {key}")
    return save(figure, folder / "sweep.png")
