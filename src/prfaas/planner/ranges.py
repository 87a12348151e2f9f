"""Ranges of a plan whose times are estimated, and the measurement that narrows them most.

The errors of the estimates are drawn, the deployment and its baselines are planned again for each
draw, and the range of a figure goes from its 5% to its 95% quantile over the draws. Threshold and
split are chosen anew in each draw, as an operator chooses them after measuring: a range says what
the hardware may turn out to be worth, not what a wrong threshold costs.

The draws are a fixed sequence, so that equal problems have equal ranges. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import ndtri

from prfaas.errors import InputError
from prfaas.estimator.uncertainty import LENGTH_ERROR, EstimateError
from prfaas.planner import baselines
from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.planner.curves import Array, Atoms, Reading, WorkCurves, cut_workload
from prfaas.planner.latency import TTFT, paper_ttft, predict
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Pool, Problem
from prfaas.planner.profile import DecodeStep, PrefillProfile, decode_rate
from prfaas.planner.workload import Workload, weighted_sum

DRAWS = 256
# The exact reading convolves distributions for a TTFT. The first draws fill the space evenly, too.
EXACT_TTFT_DRAWS = 64
LOW, HIGH = 0.05, 0.95
MERGED_ATOMS = 2048


class Range(NamedTuple):
    """Quantiles of a figure over the draws."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement, and the range that the gain would have after it."""

    what: Literal["prefill", "decode"]
    cluster: str
    accelerator: str
    gpus: int
    tokens: int  # of the prompt to measure
    batch: int | None  # decode only
    figure: Literal["gain", "lambda_max_rps"]  # which range shrinks
    before: Range
    after: Range

    @property
    def command(self) -> str:
        decode = f" --batches {self.batch}" if self.batch is not None else " --batches ''"
        return (
            f"prfaas profile --url http://... --accelerator {self.accelerator} "
            f"--gpus {self.gpus} --lengths {self.tokens}{decode} --out measured.toml"
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
    problem: Problem, reading: Reading, load_rps: float | None = None
) -> PlanRanges | None:
    """The ranges of the plan of a problem. None if nothing in it is estimated."""
    errors = _Errors(problem)
    if not errors.sources:
        return None
    outcomes = _Outcomes(problem, reading, load_rps)
    draws = _normal_draws(len(errors.sources))
    figures = outcomes.figures(errors.factors(draws), ttft=True)
    return PlanRanges(
        threshold_tokens=figures.range("threshold") if problem.remotes else None,
        n_prefill=figures.required("n_prefill"),
        lambda_max_rps=figures.required("lambda_max"),
        ttft_mean_s=figures.range("ttft_mean"),
        ttft_p90_s=figures.range("ttft_p90"),
        over_homogeneous=figures.range("over_homogeneous"),
        over_equal_cost=figures.range("over_equal_cost"),
        slo_missed=figures.slo_missed,
        narrow_with=_narrowest(problem, errors, outcomes, draws, figures),
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


class Factors(NamedTuple):
    """By what the times of a draw differ from the estimates."""

    prefill: Mapping[PrefillProfile, float]
    decode: float


class _Errors:
    """The errors of a problem on independent sources, each with the standard deviation 1."""

    def __init__(self, problem: Problem) -> None:
        self.pools = {pool.profile: pool for pool in problem.pools if pool.error is not None}
        self.decode = problem.local.decode_error
        errors = [pool.error for pool in self.pools.values() if pool.error is not None]
        if self.decode is not None:
            errors.append(self.decode)
        self.sources = tuple(dict.fromkeys(name for error in errors for name, _ in error.parts))

    def weights(self, error: EstimateError) -> Array:
        parts = dict(error.parts)
        return np.array([parts.get(source, 0.0) for source in self.sources])

    def factors(self, draws: Array) -> Iterator[Factors]:
        prefill = {
            profile: np.exp(draws @ self.weights(pool.error))
            for profile, pool in self.pools.items()
            if pool.error is not None
        }
        decode = np.ones(len(draws))
        if self.decode is not None:
            decode = np.exp(draws @ self.weights(self.decode))
        for index in range(len(draws)):
            yield Factors({p: float(f[index]) for p, f in prefill.items()}, float(decode[index]))


def _normal_draws(sources: int) -> Array:
    """Rows of independent standard normal numbers that fill the space evenly: the additive
    recurrence of generalised golden ratios (M. Roberts, 2018)."""
    ratio = 2.0
    for _ in range(64):  # the positive root of x^(sources + 1) = x + 1
        ratio = (1 + ratio) ** (1 / (sources + 1))
    steps = ratio ** -np.arange(1, sources + 1)
    points = (0.5 + np.outer(np.arange(1, DRAWS + 1), steps)) % 1.0
    return np.asarray(ndtri(points))


def _after_measuring(draws: Array, seen: Array, noise: float) -> Array:
    """The draws after a measurement of the sum `seen` of the sources, with this noise and the
    outcome that was expected: the covariance I - v v' / (v'v + noise^2), by its square root."""
    square = float((seen * seen).sum())
    if not square:
        return draws
    shrink = (1 - noise / math.sqrt(square + noise * noise)) / square
    along = (draws * seen).sum(axis=1)
    return np.asarray(draws - shrink * np.outer(along, seen))


# Plans of the draws ----------------------------------------------------------------------------


class _PacedCurves(WorkCurves):
    """Curves with the times of each profile multiplied by a factor. Both readings are linear in
    the times, so nothing is computed again."""

    def __init__(self, base: WorkCurves, factors: Mapping[PrefillProfile, float]) -> None:
        self.cuts = base.cuts
        self.kv_bytes_long = base.kv_bytes_long
        self._base = base
        self._factors = factors

    def prefill_long_s(self, profile: PrefillProfile) -> Array:
        return self._base.prefill_long_s(profile) * self._factors.get(profile, 1.0)

    def prefill_short_s(self, profile: PrefillProfile) -> Array:
        return self._base.prefill_short_s(profile) * self._factors.get(profile, 1.0)


class _PacedAtoms(Atoms):
    """The same for the times of single requests."""

    def __init__(self, base: Atoms, factors: Mapping[PrefillProfile, float]) -> None:
        self.workload = base.workload
        self.spec = base.spec
        self.growing_bytes = base.growing_bytes
        self.closing_bytes = base.closing_bytes
        self._base = base
        self._factors = factors

    def prefill_s(self, profile: PrefillProfile) -> Array:
        return self._base.prefill_s(profile) * self._factors.get(profile, 1.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one draw; NaN where there is none."""

    threshold: float
    n_prefill: float
    lambda_max: float
    over_homogeneous: float
    over_equal_cost: float
    ttft_mean: float = math.nan
    ttft_p90: float = math.nan


class _Figures:
    def __init__(self, outcomes: Sequence[Outcome], slo_missed: float) -> None:
        self.slo_missed = slo_missed
        self._columns = {
            field.name: np.array([getattr(outcome, field.name) for outcome in outcomes])
            for field in fields(Outcome)
        }

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


class _Outcomes:
    """Plans a problem under factors."""

    def __init__(self, problem: Problem, reading: Reading, load_rps: float | None) -> None:
        # A TTFT goal does not change the plan, and the load that meets it takes long to find.
        self._problem = replace(problem, workload=merged(problem.workload), goal=None)
        self._reading = reading
        self._load_rps = load_rps
        self._atoms = Atoms(self._problem.workload, problem.spec)
        self._curves = WorkCurves(cut_workload(self._problem.workload), self._atoms, reading)

    def figures(self, draws: Iterator[Factors], *, ttft: bool) -> _Figures:
        outcomes, missed, total = [], 0, 0
        most_ttft = EXACT_TTFT_DRAWS if self._reading == "exact" else DRAWS
        for factors in draws:
            try:
                outcomes.append(self._outcome(factors, ttft and total < most_ttft))
            except _NoBatch:
                missed += 1
            total += 1
        if not outcomes:
            raise InputError(
                "no decode batch meets the SLO in any draw of the estimates' errors",
                where="slo.output_tokens_per_s",
                fix="lower the SLO or choose another accelerator",
            )
        return _Figures(outcomes, missed / total)

    def _outcome(self, factors: Factors, ttft: bool) -> Outcome:
        problem = _decoding(self._problem, factors.decode)
        curves = _PacedCurves(self._curves, factors.prefill)
        choice = optimise(problem, curves)
        rates = stage_rates(problem, curves, choice)
        threshold = int(curves.cuts.threshold[choice.row])
        whole = problem.remotes and choice.n_prefill
        outcome = Outcome(
            threshold=float(threshold) if whole else 0.0,
            n_prefill=float(choice.n_prefill),
            lambda_max=rates.lambda_max,
            over_homogeneous=self._gain(rates.lambda_max, baselines.homogeneous(problem), curves),
            over_equal_cost=self._gain(rates.lambda_max, baselines.equal_cost(problem), curves),
        )
        if not ttft:
            return outcome
        shares = tuple(theta / rates.prfaas for theta in rates.each_prfaas)
        atoms = _PacedAtoms(self._atoms, factors.prefill)
        times = self._ttft(problem, atoms, threshold, choice.n_prefill, shares, rates.lambda_max)
        if times is None:  # no steady state
            return replace(outcome, ttft_mean=math.inf, ttft_p90=math.inf)
        return replace(outcome, ttft_mean=times.mean_s, ttft_p90=times.p90_s)

    def _gain(self, rate: float, baseline: Problem | None, curves: WorkCurves) -> float:
        if baseline is None:
            return math.nan
        below = stage_rates(baseline, curves, optimise(baseline, curves)).lambda_max
        return rate / below if below else math.nan

    def _ttft(
        self,
        problem: Problem,
        atoms: Atoms,
        threshold: int,
        n_prefill: int,
        shares: tuple[float, ...],
        capacity_rps: float,
    ) -> TTFT | None:
        if self._reading == "paper":
            return paper_ttft(problem, atoms, threshold, shares)
        load = self._load_rps or capacity_rps * DEFAULT_UTILISATION
        return predict(problem, atoms, threshold, n_prefill, shares, load).ttft


class _NoBatch(Exception):
    """No decode batch meets the SLO in a draw."""


def _decoding(problem: Problem, factor: float) -> Problem:
    """The problem with decode steps that take `factor` times as long."""
    local = problem.local
    if local.decode_error is None or local.output_tokens_per_s is None:
        return problem
    steps = [DecodeStep(step.batch, step.step_s * factor) for step in local.decode.steps]
    try:
        chosen = decode_rate(steps, local.output_tokens_per_s)
    except InputError:
        raise _NoBatch from None
    return replace(problem, local=replace(local, decode=chosen))


# The measurement that narrows most -----------------------------------------------------------


def _narrowest(
    problem: Problem, errors: _Errors, outcomes: _Outcomes, draws: Array, figures: _Figures
) -> Measurement | None:
    """Supposes each measurement in turn, and propagates the errors that remain."""
    figure: Literal["gain", "lambda_max_rps"] = "gain"
    column = "over_homogeneous"
    if figures.range(column) is None:
        figure, column = "lambda_max_rps", "lambda_max"
    before = figures.required(column)
    found: list[Measurement] = []
    for what, pool, error in _candidates(problem, errors):
        remaining = _after_measuring(draws, errors.weights(_measured(error)), LENGTH_ERROR)
        after = outcomes.figures(errors.factors(remaining), ttft=False).required(column)
        decode = what == "decode"
        found.append(
            Measurement(
                what=what,
                cluster=pool.cluster,
                accelerator=pool.accelerator,
                gpus=pool.gpus_per_instance,
                tokens=_typical_tokens(problem.workload),
                batch=problem.local.decode.bs_max if decode else None,
                figure=figure,
                before=before,
                after=after,
            )
        )
    best = min(found, key=lambda m: m.after.high - m.after.low, default=None)
    if best is None or best.after.high - best.after.low >= before.high - before.low:
        return None
    return best


def _candidates(
    problem: Problem, errors: _Errors
) -> Iterator[tuple[Literal["prefill", "decode"], Pool, EstimateError]]:
    for pool in errors.pools.values():
        assert pool.error is not None
        yield "prefill", pool, pool.error
    if errors.decode is not None:
        yield "decode", problem.local.pool, errors.decode


def _measured(error: EstimateError) -> EstimateError:
    """The part of an error that a measurement at one length sees and carries to others."""
    return EstimateError(
        tuple(part for part in error.parts if not part[0].startswith(("lengths", "batches")))
    )


def _typical_tokens(workload: Workload) -> int:
    """The power of two that is nearest to the mean uncached prompt."""
    return int(2 ** round(math.log2(max(1.0, weighted_sum(workload.new, workload.weight)))))
