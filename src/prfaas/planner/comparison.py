"""Solves one deployment (`Planner.solve`), and compares it with its baselines (`compare`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from prfaas.errors import InputError
from prfaas.planner import baselines
from prfaas.planner.curves import Atoms, Cuts, Reading, WorkCurves, cut_workload
from prfaas.planner.equations import eq7_threshold_imbalance, eq8_split_imbalance
from prfaas.planner.latency import TTFT, Prediction, paper_ttft, predict
from prfaas.planner.lost_sites import LostSite, lost_sites
from prfaas.planner.optimise import Choice, optimise, stage_rates
from prfaas.planner.problem import Problem
from prfaas.planner.workload import weighted_sum

# Without --load, the exact reading predicts each deployment at this share of its capacity.
DEFAULT_UTILISATION = 0.8


@dataclass(frozen=True, slots=True)
class Theta:
    """Stage throughputs in requests per second; None where the deployment has no such stage."""

    prfaas: float | None
    pd_p: float | None
    pd_d: float


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """The share of a pool's prefills whose lengths lie outside the measured range."""

    cluster: str
    fraction: float
    measured_new: tuple[int, int]  # shortest and longest
    measured_cached: int  # longest
    provenance: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "fraction": self.fraction,
            "measured_new_tokens": list(self.measured_new),
            "measured_cached_tokens": self.measured_cached,
            "profile": self.provenance,
        }


@dataclass(frozen=True, slots=True)
class Solution:
    """One deployment at its best threshold and split."""

    threshold_tokens: int | None  # None: there is no choice, one cluster prefills everything
    n_prfaas: int
    n_prefill: int
    n_decode: int
    theta: Theta
    lambda_max_rps: float
    bottleneck: str
    offload_fraction: float
    egress_bps: float  # at lambda_max_rps
    shares: tuple[float, ...]  # of the offloaded requests, one per PrfaaS cluster
    eq7_imbalance: float | None
    eq8_imbalance: float
    extrapolations: tuple[Extrapolation, ...]
    ttft: TTFT | None  # paper: without queueing. exact: at prediction.load_rps, None if unstable
    prediction: Prediction | None = None  # exact reading only
    slo_capacity_rps: float | None = None  # exact reading with a TTFT goal only
    stable_at_paper_lambda: bool | None = None  # exact reading only


@dataclass(frozen=True, slots=True)
class DeploymentComparison:
    """A deployment and its baselines, each at its best. None: the baseline does not exist."""

    reading: Reading
    prfaas_pd: Solution
    homogeneous: Solution | None
    naive: Solution | None
    equal_cost: Solution | None
    lost_sites: tuple[LostSite, ...] = ()  # of the deployment

    @property
    def ratios(self) -> dict[str, float | None]:
        def over(above: Solution | None, below: Solution | None) -> float | None:
            if above is None or below is None:
                return None
            return above.lambda_max_rps / below.lambda_max_rps

        return {
            "prfaas_over_homogeneous": over(self.prfaas_pd, self.homogeneous),
            "naive_over_homogeneous": over(self.naive, self.homogeneous),
            "prfaas_over_naive": over(self.prfaas_pd, self.naive),
            "prfaas_over_equal_cost": over(self.prfaas_pd, self.equal_cost),
        }


class Planner:
    """Solves problems that share one workload and one model, under one reading."""

    def __init__(self, problem: Problem, reading: Reading) -> None:
        self._cuts: Cuts = cut_workload(problem.workload)
        self._atoms = Atoms(problem.workload, problem.spec)
        self._paper = WorkCurves(self._cuts, self._atoms, "paper")
        self._exact = WorkCurves(self._cuts, self._atoms, "exact") if reading == "exact" else None
        self._reading: Reading = reading
        # Points of a sweep often share baselines: homogeneous PD does not depend on a link's speed.
        self._solved: dict[tuple[Problem, float | None], Solution] = {}

    def compare(self, problem: Problem, load_rps: float | None = None) -> DeploymentComparison:
        assert problem.workload is self._cuts.workload, "a planner serves one workload"

        def solved(other: Problem | None) -> Solution | None:
            return None if other is None else self.solve(other, load_rps)

        best = self.solve(problem, load_rps)
        return DeploymentComparison(
            reading=self._reading,
            prfaas_pd=best,
            homogeneous=solved(baselines.homogeneous(problem)),
            naive=solved(baselines.naive(problem)),
            equal_cost=solved(baselines.equal_cost(problem)),
            lost_sites=lost_sites(problem, self.curves, best.lambda_max_rps, best.n_prefill),
        )

    @property
    def curves(self) -> WorkCurves:
        return self._exact or self._paper

    def solve(self, problem: Problem, load_rps: float | None = None) -> Solution:
        key = (problem, load_rps)
        if key not in self._solved:
            self._solved[key] = self._solve(problem, load_rps)
        return self._solved[key]

    def _solve(self, problem: Problem, load_rps: float | None) -> Solution:
        choice = optimise(problem, self.curves)
        solution = self._describe(problem, choice)
        if solution.lambda_max_rps <= 0:
            raise InputError(
                "no instance can prefill with this split and threshold: Lambda_max is 0",
                where="clusters",
                fix="give the pd cluster a prefill instance, or offload everything",
            )
        if self._exact is None:
            ttft = paper_ttft(problem, self._atoms, self._threshold(choice), solution.shares)
            return replace(solution, ttft=ttft)
        return self._predict_at_load(problem, choice, solution, load_rps)

    def _threshold(self, choice: Choice) -> int:
        return int(self._cuts.threshold[choice.row])

    def _describe(self, problem: Problem, choice: Choice) -> Solution:
        row, n_prefill = choice
        stage = stage_rates(problem, self.curves, choice)
        p = float(self._cuts.p[row])
        prfaas = stage.prfaas if problem.remotes and p > 0 else None
        pd_p = stage.pd_p if n_prefill else None
        kv_bytes = float(self.curves.kv_bytes_long[row])
        return Solution(
            threshold_tokens=self._threshold(choice) if problem.remotes and n_prefill else None,
            n_prfaas=sum(remote.pool.instances for remote in problem.remotes),
            n_prefill=n_prefill,
            n_decode=problem.local.pool.instances - n_prefill,
            theta=Theta(prfaas, pd_p, stage.pd_d),
            lambda_max_rps=stage.lambda_max,
            bottleneck=_bottleneck(problem, self.curves, choice),
            offload_fraction=p,
            egress_bps=stage.lambda_max * p * kv_bytes * 8,
            shares=tuple(theta / stage.prfaas for theta in stage.each_prfaas),
            eq7_imbalance=None
            if prfaas is None or pd_p is None or p == 1
            else eq7_threshold_imbalance(prfaas, pd_p, p),
            eq8_imbalance=eq8_split_imbalance(prfaas or 0.0, pd_p or 0.0, stage.pd_d),
            extrapolations=extrapolations(problem, self._threshold(choice)),
            ttft=None,
        )

    def _predict_at_load(
        self, problem: Problem, choice: Choice, solution: Solution, load_rps: float | None
    ) -> Solution:
        capacity = solution.lambda_max_rps
        threshold, shares = self._threshold(choice), solution.shares
        load = capacity * DEFAULT_UTILISATION if load_rps is None else load_rps

        def at(rps: float) -> Prediction:
            return predict(problem, self._atoms, threshold, choice.n_prefill, shares, rps)

        prediction = at(load)
        slo_capacity = None
        if problem.goal is not None:
            low, high = 0.0, capacity
            for _ in range(14):  # to 1e-4 of the capacity
                middle = (low + high) / 2
                low, high = (middle, high) if at(middle).meets_goal else (low, middle)
            slo_capacity = low
        paper_rates = stage_rates(problem, self._paper, optimise(problem, self._paper))
        return replace(
            solution,
            ttft=prediction.ttft,
            prediction=prediction,
            slo_capacity_rps=slo_capacity,
            stable_at_paper_lambda=paper_rates.lambda_max < capacity,
        )


def compare(
    problem: Problem, reading: Reading, load_rps: float | None = None
) -> DeploymentComparison:
    return Planner(problem, reading).compare(problem, load_rps)


def _bottleneck(problem: Problem, curves: WorkCurves, choice: Choice) -> str:
    """The stage that limits Lambda_max, by the paper's name."""
    stage = stage_rates(problem, curves, choice)
    p = float(curves.cuts.p[choice.row])
    headroom = {"PD-D decode": stage.pd_d}
    if choice.n_prefill and p < 1:
        headroom["PD-P prefill"] = stage.pd_p / (1 - p)
    if problem.remotes and p > 0:
        compute = sum(
            remote.pool.instances / float(curves.prefill_long_s(remote.pool.profile)[choice.row])
            for remote in problem.remotes
        )
        compute_bound = stage.prfaas >= compute * (1 - 1e-9)
        headroom["PrfaaS prefill" if compute_bound else "PrfaaS egress"] = stage.prfaas / p
    return min(headroom, key=lambda name: headroom[name])


def extrapolations(problem: Problem, threshold: int) -> tuple[Extrapolation, ...]:
    """The prefills beyond the profiles' points, if requests above the threshold are offloaded."""
    work = problem.workload
    short, long = work.divided(threshold)
    sides = [(problem.local.pool, short), *((remote.pool, long) for remote in problem.remotes)]
    found = []
    for pool, atoms in sides:
        weight = work.weight[atoms]
        if not weight.size:
            continue
        beyond = pool.profile.extrapolated(work.new[atoms], work.cached[atoms]).astype(float)
        fraction = weighted_sum(beyond, weight) / float(weight.sum())
        if fraction > 0:
            profile = pool.profile
            found.append(
                Extrapolation(
                    pool.cluster,
                    fraction,
                    profile.measured_range,
                    profile.measured_cached,
                    profile.provenance,
                )
            )
    return tuple(found)
