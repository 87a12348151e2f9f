"""The curves of a plan's page: throughput over the threshold, over the split, and over a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prfaas.planner.comparison import DeploymentComparison, Solution
from prfaas.planner.curves import WorkCurves
from prfaas.planner.network.plan import HomePlan, NetworkPlan
from prfaas.planner.network.shown_curves import RateCurve
from prfaas.planner.problem import Problem
from prfaas.planner.shown_curves import split_curve, threshold_curve

_MOST_POINTS = 200  # of a line; a workload has as many thresholds as lengths
_WIDE = 20  # a sweep over a wider range has a logarithmic axis, as in `--plot`


class Best(NamedTuple):
    x: float
    y: float
    text: str


class Curve(NamedTuple):
    title: str
    x_label: str
    x: Sequence[float]
    lines: Mapping[str, Iterable[float]]
    best: Best | None = None
    y_label: str = "requests/s"
    y_max: float | None = None  # where the axis ends; None: at the largest value
    x_log: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON has no infinity: a line has a gap where a stage has no limit."""
        return {
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "x": list(self.x),
            "x_log": self.x_log,
            "lines": [
                {"name": name, "y": [round(y, 4) if math.isfinite(y) else None for y in values]}
                for name, values in self.lines.items()
            ],
            "y_max": self.y_max,
            "best": None if self.best is None else self.best._asdict(),
        }


def stage_curves(problem: Problem, curves: WorkCurves, best: Solution) -> list[Curve]:
    """Of a deployment with one PD cluster: what each stage sustains (figures 5a and 5b)."""
    rate = best.lambda_max_rps
    made = []
    over = threshold_curve(problem, curves, best)
    if over is not None and len(over.threshold_tokens) > 1:
        tokens = over.threshold_tokens
        assert best.threshold_tokens is not None
        count = min(len(tokens), _MOST_POINTS)
        even = np.linspace(0, len(tokens) - 1, count).round().astype(int)
        chosen = np.unique(np.append(even, np.searchsorted(tokens, best.threshold_tokens)))
        made.append(
            Curve(
                title=f"Throughput over the threshold, with {best.n_prefill} prefill nodes",
                x_label="threshold (tokens)",
                x=tokens[chosen].tolist(),
                lines={
                    "PrfaaS clusters and their links": over.prfaas_rps[chosen].tolist(),
                    "local prefill": over.pd_p_rps[chosen].tolist(),
                    "decode": [over.pd_d_rps] * len(chosen),
                },
                best=Best(best.threshold_tokens, rate, f"{best.threshold_tokens:,} tokens"),
                y_max=3 * rate,
            )
        )
    splits = split_curve(problem, curves, best)
    if len(splits.n_prefill) > 1:
        made.append(
            Curve(
                title="Throughput over the split, at the best threshold",
                x_label="local nodes that prefill",
                x=splits.n_prefill.tolist(),
                lines={
                    "prefill, local and remote": splits.prefill_rps.tolist(),
                    "decode": splits.decode_rps.tolist(),
                    "the deployment": splits.lambda_max_rps.tolist(),
                },
                best=Best(best.n_prefill, rate, f"{best.n_prefill} of {len(splits.n_prefill) + 1}"),
            )
        )
    return made


def total_rate_curves(curves: Sequence[RateCurve], plan: NetworkPlan) -> list[Curve]:
    """Of a deployment with several PD clusters: the total rate, where one of them differs."""
    return [_total_rate(curve, plan.home(curve.cluster), plan.rate_rps) for curve in curves]


def _total_rate(curve: RateCurve, home: HomePlan, rate_rps: float) -> Curve:
    if curve.varied == "threshold":
        assert home.threshold_tokens is not None
        best = Best(home.threshold_tokens, rate_rps, f"{home.threshold_tokens:,} tokens")
        x_label = f"threshold of {home.cluster} (tokens)"
    else:
        nodes = home.n_prefill + home.n_decode
        best = Best(home.n_prefill, rate_rps, f"{home.n_prefill} of {nodes}")
        x_label = f"nodes of {home.cluster} that prefill"
    return Curve(
        title=f"Total throughput over the {curve.varied} of {home.cluster}",
        x_label=x_label,
        x=curve.values,
        lines={"all PD clusters, everything else at its best": curve.rates_rps},
        best=best,
    )


def sweep_curve(
    key: str, values: Sequence[Any], plans: Sequence[DeploymentComparison]
) -> Curve | None:
    """None where the values are not numbers, so that they have no place on an axis."""
    if not all(isinstance(value, int | float) for value in values):
        return None
    lines = {}
    for name, label in (
        ("prfaas_pd", "PrfaaS-PD"),
        ("homogeneous", "homogeneous PD"),
        ("naive", "naive heterogeneous"),
    ):
        solutions: list[Solution | None] = [getattr(plan, name) for plan in plans]
        if all(solution is not None for solution in solutions):
            lines[label] = [s.lambda_max_rps for s in solutions if s is not None]
    return Curve(
        title=f"Throughput over {key}, with the best threshold and split for each value",
        x_label=key,
        x=list(values),
        lines=lines,
        x_log=min(values) > 0 and max(values) / min(values) > _WIDE,
    )
