"""A comparison of deployments as plain data, for `prfaas plan --json`; what of it is estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.catalog import Catalog
from prfaas.catalog.provenance import Sourced
from prfaas.estimator.uncertainty import EstimateError
from prfaas.planner.comparison import DeploymentComparison, Solution
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.planner.ranges import PlanRanges, Range

SYSTEMS = ("prfaas_pd", "homogeneous", "naive", "equal_cost")
# Figures of an accelerator that times are estimated from.
FIGURES = (
    *("bf16_tflops", "fp8_tflops", "fp4_tflops", "memory_gb", "memory_tbps"),
    *("interconnect_gbs", "interconnect_gpus"),
)


@dataclass(frozen=True, slots=True)
class EstimatedTimes:
    """Prefill times or decode steps of a cluster that are estimated."""

    cluster: str
    what: Literal["prefill", "decode"]
    accelerator: str
    gpus: int
    error: EstimateError
    provenance: str
    inferred: tuple[str, ...]  # figures of the accelerator that are not published


def estimated_times(problem: Problem, catalog: Catalog) -> list[EstimatedTimes]:
    found = []
    for pool in problem.pools:
        what: list[tuple[Literal["prefill", "decode"], EstimateError | None, str]] = [
            ("prefill", pool.error, pool.profile.provenance)
        ]
        if pool is problem.local.pool:
            local = problem.local
            what.append(("decode", local.decode_error, local.decode_provenance))
        for kind, error, provenance in what:
            if error is not None:
                found.append(
                    EstimatedTimes(
                        cluster=pool.cluster,
                        what=kind,
                        accelerator=pool.accelerator,
                        gpus=pool.gpus_per_instance,
                        error=error,
                        provenance=provenance,
                        inferred=_inferred_figures(catalog, pool.accelerator),
                    )
                )
    return found


def estimated_in_network(problem: NetworkProblem, catalog: Catalog) -> list[EstimatedTimes]:
    """Of each cluster once, although a PrfaaS cluster may serve several PD clusters."""
    found: dict[tuple[str, str], EstimatedTimes] = {}
    for home in problem.homes:
        for times in estimated_times(home.problem, catalog):
            found.setdefault((times.cluster, times.what), times)
    return list(found.values())


def estimates_as_dict(estimated: list[EstimatedTimes], ranges: PlanRanges | None) -> dict[str, Any]:
    """`estimated`, `ranges` and `narrow_with` of `prfaas plan --json`."""
    report: dict[str, Any] = {
        "estimated": [
            {
                "cluster": times.cluster,
                "what": times.what,
                "accelerator": times.accelerator,
                "gpus_per_instance": times.gpus,
                "log_error": times.error.sigma,
                "provenance": times.provenance,
                "inferred_figures": list(times.inferred),
            }
            for times in estimated
        ],
        "ranges": None,
        "narrow_with": None,
    }
    if ranges is None:
        return report
    named = {
        "threshold_tokens": ranges.threshold_tokens,
        "n_prefill": ranges.n_prefill,
        "lambda_max_rps": ranges.lambda_max_rps,
        "ttft_mean_s": ranges.ttft_mean_s,
        "ttft_p90_s": ranges.ttft_p90_s,
        "prfaas_over_homogeneous": ranges.over_homogeneous,
        "prfaas_over_equal_cost": ranges.over_equal_cost,
    }
    report["ranges"] = {name: _range_as_dict(found) for name, found in named.items()}
    report["ranges"]["slo_missed"] = ranges.slo_missed
    best = ranges.narrow_with
    if best is not None:
        report["narrow_with"] = {
            "cluster": best.cluster,
            "accelerator": best.accelerator,
            "gpus_per_instance": best.gpus,
            "lengths": list(best.lengths),
            "batches": list(best.batches),
            "figure": best.figure,
            "before": _range_as_dict(best.before),
            "after": _range_as_dict(best.after),
            "command": best.command,
        }
    return report


def _range_as_dict(found: Range | None) -> dict[str, float | None] | None:
    """JSON has no infinity: an unstable system has no TTFT."""
    if found is None:
        return None
    return {k: v if math.isfinite(v) else None for k, v in found._asdict().items()}


def _inferred_figures(catalog: Catalog, accelerator: str) -> tuple[str, ...]:
    figures: list[tuple[str, Sourced | None]] = [
        (name, getattr(catalog.accelerator(accelerator), name)) for name in FIGURES
    ]
    return tuple(n for n, figure in figures if figure is not None and figure.status == "inferred")


def comparison_as_dict(comparison: DeploymentComparison) -> dict[str, Any]:
    systems = {name: _solution_as_dict(getattr(comparison, name)) for name in SYSTEMS}
    return {
        "reading": comparison.reading,
        **systems,
        "ratios": comparison.ratios,
        "lost_sites": [lost.as_dict() for lost in comparison.lost_sites],
    }


def _solution_as_dict(solution: Solution | None) -> dict[str, Any] | None:
    if solution is None:
        return None
    ttft, theta = solution.ttft, solution.theta
    report = {
        "threshold_tokens": solution.threshold_tokens,
        "n_prfaas": solution.n_prfaas,
        "n_prefill": solution.n_prefill,
        "n_decode": solution.n_decode,
        "theta_rps": {"prfaas": theta.prfaas, "pd_p": theta.pd_p, "pd_d": theta.pd_d},
        "lambda_max_rps": solution.lambda_max_rps,
        "bottleneck": solution.bottleneck,
        "offload_fraction": solution.offload_fraction,
        "egress_gbps": solution.egress_bps / 1e9,
        "ttft_mean_s": ttft and ttft.mean_s,
        "ttft_p50_s": ttft and ttft.p50_s,
        "ttft_p90_s": ttft and ttft.p90_s,
        "ttft_p99_s": ttft and ttft.p99_s,
        "eq7_imbalance": solution.eq7_imbalance,
        "eq8_imbalance": solution.eq8_imbalance,
        "extrapolated": [extrapolation.as_dict() for extrapolation in solution.extrapolations],
    }
    prediction = solution.prediction
    if prediction is not None:
        report |= {
            "load_rps": prediction.load_rps,
            "stable": prediction.stable,
            "stable_at_paper_lambda": solution.stable_at_paper_lambda,
            "prefill_wait_mean_s": prediction.prefill_wait_mean_s,
            "utilisation": {stage.name: stage.utilisation for stage in prediction.stages},
            "slo_capacity_rps": solution.slo_capacity_rps,
        }
    return report
