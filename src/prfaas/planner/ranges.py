"""Ranges of a plan whose times are estimated, and the measurement that narrows them most.

The errors of the estimates are drawn, the deployment and its baselines are planned again for each
draw, and the range of a figure goes from its 5% to its 95% quantile over the draws. Threshold and
split are chosen anew in each draw, as an operator chooses them after measuring: a range says what
the hardware may turn out to be worth, not what a wrong threshold costs.

The draws are a fixed sequence, so that equal problems have equal ranges. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import ndtri

from prfaas.errors import InputError
from prfaas.estimator.uncertainty import EstimateError
from prfaas.planner import baselines
from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.planner.curves import Array, Atoms, Reading, WorkCurves, cut_workload
from prfaas.planner.drawn_plans import DrawnPlans, Draws, plan_draws
from prfaas.planner.latency import TTFT, paper_ttft, predict
from prfaas.planner.problem import Pool, Problem
from prfaas.planner.profile import DecodeRate, DecodeStep, PrefillProfile, decode_rate
from prfaas.planner.workload import Workload, weighted_sum

DRAWS = 512
# A TTFT takes longer than a plan; the exact reading convolves distributions for it. The first draws
# fill the space evenly, too.
TTFT_DRAWS: dict[Reading, int] = {"paper": 256, "exact": 64}
LOW, HIGH = 0.05, 0.95
MERGED_ATOMS = 1024


class Range(NamedTuple):
    """Quantiles of a figure over the draws."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of `prfaas profile`, and the range that a figure has after it."""

    cluster: str
    accelerator: str
    gpus: int
    lengths: tuple[int, ...]
    batches: tuple[int, ...]  # empty: decode is not measured
    figure: Literal["gain", "lambda_max_rps"]  # whose range shrinks
    before: Range
    after: Range

    @property
    def command(self) -> str:
        lengths = ",".join(map(str, self.lengths))
        batches = ",".join(map(str, self.batches)) or "''"
        return (
            f"prfaas profile --url http://HOST:PORT --accelerator {self.accelerator} "
            f"--gpus {self.gpus} --lengths {lengths} --batches {batches} --out measured.toml"
        )


@dataclass(frozen=True, slots=True)
class PlanRanges:
    """None: the plan does not have the figure. A threshold of 0: everything is offloaded."""

    threshold_tokens: Range | None
    n_prefill: Range
    lambda_max_rps: Range
    ttft_mean_s: Range | None
    ttft_p90_s: Range | None
    over_homogeneous: Range | None
    over_equal_cost: Range | None
    slo_missed: float  # share of draws in which no decode batch meets the SLO
    narrow_with: Measurement | None


def plan_ranges(
    problem: Problem,
    reading: Reading,
    load_rps: float | None = None,
    *,
    draws: int = DRAWS,
    narrow: bool = True,
) -> PlanRanges | None:
    """The ranges of the plan of a problem. None if nothing in it is estimated. `narrow` says
    whether to look for the measurement that narrows them, which takes most of the time."""
    errors = _Errors(problem)
    if not errors.sources:
        return None
    plans = _Drawn(problem, reading, load_rps)
    drawn = _normal_draws(draws, len(errors.sources))
    figures = plans.figures(errors.prefill_factors(drawn), errors.decode_factors(drawn), ttft=True)
    return PlanRanges(
        threshold_tokens=figures.range("threshold") if problem.remotes else None,
        n_prefill=figures.required("n_prefill"),
        lambda_max_rps=figures.required("lambda_max"),
        ttft_mean_s=figures.range("ttft_mean"),
        ttft_p90_s=figures.range("ttft_p90"),
        over_homogeneous=figures.range("over_homogeneous"),
        over_equal_cost=figures.range("over_equal_cost"),
        slo_missed=figures.slo_missed,
        narrow_with=_narrowest(problem, errors, plans, drawn, figures) if narrow else None,
    )


def merged(workload: Workload, most_atoms: int = MERGED_ATOMS) -> Workload:
    """The workload with neighbouring atoms merged into about `most_atoms` of equal weight. Means
    stay as they are; thresholds become coarser by a part in `most_atoms` of the requests."""
    if len(workload.new) <= most_atoms:
        return workload
    group = np.minimum(np.cumsum(workload.weight) * most_atoms, most_atoms - 0.5).astype(np.int64)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    weight = np.add.reduceat(workload.weight, first)
    filled = weight > 0
    if not filled.all():
        return workload
    return replace(
        workload,
        new=np.add.reduceat(workload.new * workload.weight, first) / weight,
        cached=np.add.reduceat(workload.cached * workload.weight, first) / weight,
        weight=weight,
    )


# Errors as factors ---------------------------------------------------------------------------


class _Errors:
    """The errors of a problem on independent sources, each with the standard deviation 1."""

    def __init__(self, problem: Problem) -> None:
        self.pools = {pool.profile: pool for pool in problem.pools if pool.error is not None}
        self.local = problem.local.pool
        self.decode = problem.local.decode_error
        errors = [pool.error for pool in self.pools.values() if pool.error is not None]
        if self.decode is not None:
            errors.append(self.decode)
        named = [source for error in errors for source, _ in (*error.common, (error.instance, 0))]
        self.sources = tuple(dict.fromkeys(named))

    def weights(self, error: EstimateError, *, length: bool = True) -> Array:
        """The error on the sources, with or without what differs from length to length."""
        parts = dict(error.common)
        if length:
            parts[error.instance] = error.length
        return np.array([parts.get(source, 0.0) for source in self.sources])

    def prefill_factors(
        self, drawn: Array, measured: Pool | None = None
    ) -> dict[PrefillProfile, Array]:
        """The factors of each draw. The times of the `measured` pool are not estimated."""
        return {
            profile: np.exp(drawn @ self.weights(pool.error))
            for profile, pool in self.pools.items()
            if pool.error is not None and (measured is None or profile != measured.profile)
        }

    def decode_factors(self, drawn: Array, measured: Pool | None = None) -> Array:
        if self.decode is None or self.local is measured:
            return np.ones(len(drawn))
        return np.asarray(np.exp(drawn @ self.weights(self.decode)))

    def of_pool(self, pool: Pool) -> list[EstimateError]:
        """The errors that a measurement of this pool's instances removes."""
        decode = self.decode if pool is self.local else None
        return [error for error in (pool.error, decode) if error is not None]


def _normal_draws(draws: int, sources: int) -> Array:
    """Rows of independent standard normal numbers that fill the space evenly: the additive
    recurrence of generalised golden ratios (M. Roberts, 2018)."""
    ratio = 2.0
    for _ in range(64):  # the positive root of x^(sources + 1) = x + 1
        ratio = (1 + ratio) ** (1 / (sources + 1))
    steps = ratio ** -np.arange(1, sources + 1)
    points = (0.5 + np.outer(np.arange(1, draws + 1), steps)) % 1.0
    return np.asarray(ndtri(points))


def _after_measuring(draws: Array, seen: Array, noise: Array) -> Array:
    """The draws after a measurement: each row of `seen` is a sum of sources that is measured, with
    its noise. The outcome is supposed to be the expected one, so the mean stays."""
    before = np.eye(draws.shape[1])
    gain = np.linalg.solve(seen @ seen.T + np.diag(noise**2), seen)
    values, vectors = np.linalg.eigh(before - seen.T @ gain)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return np.asarray(draws @ root)


# Figures of the draws ----------------------------------------------------------------------------


class _Figures:
    """Each figure in all draws; NaN where a draw does not have it."""

    def __init__(self, columns: dict[str, Array], slo_missed: float) -> None:
        self.slo_missed = slo_missed
        self._columns = columns

    def range(self, name: str) -> Range | None:
        column = self._columns[name]
        column = column[~np.isnan(column)]
        if not column.size:
            return None
        # Quantiles are values of the column: between a time and infinity there is no middle.
        low, median, high = np.quantile(column, (LOW, 0.5, HIGH), method="closest_observation")
        return Range(float(low), float(median), float(high))

    def required(self, name: str) -> Range:
        found = self.range(name)
        assert found is not None, "every draw has this figure"
        return found


class _Drawn:
    """Plans a problem and its baselines with the times of each draw."""

    def __init__(self, problem: Problem, reading: Reading, load_rps: float | None) -> None:
        # A TTFT goal does not change the plan, and the load that meets it takes long to find.
        self._problem = replace(problem, workload=merged(problem.workload), goal=None)
        self._reading = reading
        self._load_rps = load_rps
        self._atoms = Atoms(self._problem.workload, problem.spec)
        self._curves = WorkCurves(cut_workload(self._problem.workload), self._atoms, reading)

    def figures(
        self, prefill: Mapping[PrefillProfile, Array], decode: Array, *, ttft: bool
    ) -> _Figures:
        rates = [_decode_rate(self._problem, float(factor)) for factor in decode]
        served = np.array([rate is not None for rate in rates])
        if not served.any():
            raise InputError(
                "no decode batch meets the SLO in any draw of the estimates' errors",
                where="slo.output_tokens_per_s",
                fix="lower the SLO or choose another accelerator",
            )
        draws = Draws(
            {profile: factors[served] for profile, factors in prefill.items()},
            tuple(rate for rate in rates if rate is not None),
        )
        plans = plan_draws(self._problem, self._curves, draws)
        threshold = self._curves.cuts.threshold[plans.row].astype(float)
        columns = {
            "threshold": np.where(plans.n_prefill > 0, threshold, 0.0),
            "n_prefill": plans.n_prefill.astype(float),
            "lambda_max": plans.lambda_max,
            "over_homogeneous": self._gains(plans, baselines.homogeneous(self._problem), draws),
            "over_equal_cost": self._gains(plans, baselines.equal_cost(self._problem), draws),
        }
        if ttft:
            times = [self._ttft(plans, draws, index) for index in range(self._ttft_draws(draws))]
            # Without a steady state there is no TTFT: it grows without bound.
            columns["ttft_mean"] = np.array([t.mean_s if t else np.inf for t in times])
            columns["ttft_p90"] = np.array([t.p90_s if t else np.inf for t in times])
        return _Figures(columns, 1 - float(served.mean()))

    def _gains(self, plans: DrawnPlans, baseline: Problem | None, draws: Draws) -> Array:
        if baseline is None:
            return np.full(len(plans.row), np.nan)
        below = plan_draws(baseline, self._curves, draws).lambda_max
        return np.asarray(plans.lambda_max / below)

    def _ttft_draws(self, draws: Draws) -> int:
        return min(len(draws.decode), TTFT_DRAWS[self._reading])

    def _ttft(self, plans: DrawnPlans, draws: Draws, index: int) -> TTFT | None:
        local = replace(self._problem.local, decode=draws.decode[index])
        problem = replace(self._problem, local=local)
        factors = {profile: float(drawn[index]) for profile, drawn in draws.prefill.items()}
        atoms = _PacedAtoms(self._atoms, factors)
        threshold = int(self._curves.cuts.threshold[plans.row[index]])
        each = plans.each_prfaas[:, index]
        shares = tuple((each / each.sum()).tolist())
        if self._reading == "paper":
            return paper_ttft(problem, atoms, threshold, shares)
        load = self._load_rps or float(plans.lambda_max[index]) * DEFAULT_UTILISATION
        n_prefill = int(plans.n_prefill[index])
        return predict(problem, atoms, threshold, n_prefill, shares, load).ttft


class _PacedAtoms(Atoms):
    """The times of single requests, with those of each profile multiplied by a factor."""

    def __init__(self, base: Atoms, factors: Mapping[PrefillProfile, float]) -> None:
        self.workload = base.workload
        self.spec = base.spec
        self.growing_bytes = base.growing_bytes
        self.closing_bytes = base.closing_bytes
        self._base = base
        self._factors = factors

    def prefill_s(self, profile: PrefillProfile) -> Array:
        return self._base.prefill_s(profile) * self._factors.get(profile, 1.0)


def _decode_rate(problem: Problem, factor: float) -> DecodeRate | None:
    """The operating point with steps that take `factor` times as long. None if no batch meets the
    SLO then."""
    local = problem.local
    if local.decode_error is None or local.output_tokens_per_s is None:
        return local.decode
    steps = [DecodeStep(step.batch, step.step_s * factor) for step in local.decode.steps]
    try:
        return decode_rate(steps, local.output_tokens_per_s)
    except InputError:
        return None


def error_draws(problem: Problem, count: int) -> Draws | None:
    """Draws of the errors of a problem's estimates, without those in which no decode batch meets
    the SLO. None if nothing is estimated, or if no draw meets it."""
    errors = _Errors(problem)
    if not errors.sources:
        return None
    normal = _normal_draws(count, len(errors.sources))
    rates = [_decode_rate(problem, float(factor)) for factor in errors.decode_factors(normal)]
    served = np.array([rate is not None for rate in rates])
    if not served.any():
        return None
    return Draws(
        {profile: drawn[served] for profile, drawn in errors.prefill_factors(normal).items()},
        tuple(rate for rate in rates if rate is not None),
    )


# The measurement that narrows most -----------------------------------------------------------


def _narrowest(
    problem: Problem, errors: _Errors, plans: _Drawn, drawn: Array, figures: _Figures
) -> Measurement | None:
    """Supposes each measurement in turn, and propagates the errors that remain."""
    figure: Literal["gain", "lambda_max_rps"] = "gain"
    column = "over_homogeneous"
    if figures.range(column) is None:
        figure, column = "lambda_max_rps", "lambda_max"
    before = figures.required(column)
    lengths = _lengths_to_measure(problem.workload)
    found: list[Measurement] = []
    for pool in problem.pools:
        known = errors.of_pool(pool)
        if not known:
            continue
        seen = np.stack([errors.weights(error, length=False) for error in known])
        noise = np.array([error.length for error in known]) / math.sqrt(len(lengths))
        remaining = _after_measuring(drawn, seen, noise)
        after = plans.figures(
            errors.prefill_factors(remaining, measured=pool),
            errors.decode_factors(remaining, measured=pool),
            ttft=False,
        )
        decodes = pool is errors.local and errors.decode is not None
        found.append(
            Measurement(
                cluster=pool.cluster,
                accelerator=pool.accelerator,
                gpus=pool.gpus_per_instance,
                lengths=lengths,
                batches=_batches_to_measure(problem) if decodes else (),
                figure=figure,
                before=before,
                after=after.required(column),
            )
        )
    best = min(found, key=lambda m: m.after.high - m.after.low, default=None)
    if best is None or best.after.high - best.after.low >= before.high - before.low:
        return None
    return best


def _lengths_to_measure(workload: Workload) -> tuple[int, ...]:
    """Powers of two about the workload's short, mean and long prompts."""
    cumulative = np.cumsum(workload.weight) / workload.weight.sum()
    short, long = (workload.new[np.searchsorted(cumulative, q)] for q in (0.1, 0.95))
    mean = weighted_sum(workload.new, workload.weight)
    return tuple(sorted({int(2 ** round(math.log2(max(1.0, n)))) for n in (short, mean, long)}))


def _batches_to_measure(problem: Problem) -> tuple[int, ...]:
    """The batch of the plan, one below and one above it: larger batches than measured ones are
    never planned with."""
    decode = problem.local.decode
    most = decode.steps[-1].batch if decode.steps else decode.bs_max
    planned = decode.bs_max
    return tuple(sorted({max(1, planned // 4), planned, min(most, planned * 2)}))
