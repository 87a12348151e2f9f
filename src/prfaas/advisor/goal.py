"""Whether a deployment meets a goal for the time to first token, by the planner's exact reading."""

from __future__ import annotations

import numpy as np

from prfaas.advisor.market import LinkChoice, Market, Place
from prfaas.advisor.option import Option, problem_of
from prfaas.advisor.work import TrafficWork
from prfaas.planner.curves import WorkCurves
from prfaas.planner.latency import predict
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import LatencyGoal

_HALVINGS = 10  # to 0.1% of the rate


class GoalCheck:
    """Checks deployments of one market. A threshold and a split are those of the largest rate."""

    def __init__(self, market: Market, traffic: TrafficWork, goal: LatencyGoal) -> None:
        self._market = market
        self._atoms = traffic.atoms
        self._curves = WorkCurves(traffic.cuts, traffic.atoms, "exact")
        self._goal = goal

    def sustained(self, option: Option, least: float) -> float | None:
        """The largest rate up to that of the option at which the goal holds. None: not even at
        `least`."""
        problem = problem_of(self._market, option)
        choice = optimise(problem, self._curves)
        rates = stage_rates(problem, self._curves, choice)
        threshold = int(self._curves.cuts.threshold[choice.row])
        shares = tuple(theta / rates.prfaas for theta in rates.each_prfaas)

        def holds(rps: float) -> bool:
            found = predict(problem, self._atoms, threshold, choice.n_prefill, shares, rps)
            return bool(found.meets_goal)

        # Utilisations below 1 leave room for rounding: a full stage has no steady state.
        most = min(option.rate_rps, rates.lambda_max * (1 - 1e-6))
        low, high = min(max(least, most * 1e-3), most), most
        if not holds(low):
            return None
        if holds(most):
            return most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def hopeless(self, here: Place, there: Place | None, link: LinkChoice | None) -> bool:
        """True if the goal fails even on idle machines that each request chooses between."""
        seconds = self._atoms.prefill_s(here.build.profile)
        if there is not None and link is not None:
            closing_s = self._atoms.closing_bytes * 8 / link.bps
            away = self._atoms.prefill_s(there.build.profile) + closing_s + link.rtt_s
            seconds = np.minimum(seconds, away)
        late = seconds > self._goal.ttft_s
        return float(self._atoms.workload.weight[late].sum()) > 1 - self._goal.quantile
