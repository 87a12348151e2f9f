"""The answer to a question: the best few options, what they cost and gain, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas.advisor.certainty import Certainty, certainty
from prfaas.advisor.market import Market
from prfaas.advisor.option import Alternative, Option, Separate, gain_over, problem_of
from prfaas.advisor.search import Progress, Search
from prfaas.advisor.size_limit import within_limit
from prfaas.advisor.verdict import Verdict, judge
from prfaas.advisor.work import TrafficWork, coarsened
from prfaas.errors import InputError
from prfaas.planner.comparison import Planner, Solution
from prfaas.planner.lost_sites import LostSite, lost_sites

SINGLES = 3  # clusters without PrfaaS that are shown


@dataclass(frozen=True, slots=True)
class Assessed:
    """An option with everything that is said about it."""

    option: Option
    solution: Solution  # threshold, split and TTFT, as `prfaas plan --reading exact` finds them
    used_bps: float  # on the link, at the sustained rate
    needed_bps: float  # the slowest link with which this hardware keeps its rate
    usd_per_million_tokens: float  # prompt tokens that are not cached, and output tokens
    usd_per_million_output_tokens: float
    gain: float | None  # over the best without PrfaaS; None: there is none
    over_single: float | None  # gain over the best PD cluster of one accelerator
    certainty: Certainty | None  # of the gain; None: nothing to be unsure of
    lost_sites: tuple[LostSite, ...]  # what it serves without its PrfaaS cluster, if it has one


@dataclass(frozen=True, slots=True)
class Answer:
    market: Market
    prfaas: tuple[Assessed, ...]
    same: Assessed | None
    singles: tuple[Assessed, ...]
    separate: Separate | None  # only where it is better than the best single cluster
    verdict: Verdict

    @property
    def best(self) -> Assessed:
        """The best PrfaaS option where it is worth it, else the best single PD cluster."""
        if self.prfaas and (self.verdict.worth_it or not self.singles):
            return self.prfaas[0]
        return self.singles[0]


def advise(market: Market, progress: Progress = iter) -> Answer:
    """Raises if no deployment can serve, or if the question is too large."""
    traffic = TrafficWork(coarsened(market.workload), market.spec)
    market = within_limit(market, traffic)
    search = Search(market, traffic)
    found = search.run(progress)
    if not found.prfaas and not found.singles:
        raise _nothing(search)
    alternative = found.alternative(market)
    single = found.singles[0] if found.singles else None
    describe = _Describer(search, alternative, single)
    return Answer(
        market=market,
        prfaas=tuple(describe(option) for option in found.prfaas),
        same=None if found.same is None else describe(found.same),
        singles=tuple(describe(option) for option in found.singles[:SINGLES]),
        separate=alternative if isinstance(alternative, Separate) else None,
        verdict=judge(search, found),
    )


class _Describer:
    def __init__(
        self, search: Search, alternative: Alternative | None, single: Option | None
    ) -> None:
        self._search = search
        self._alternative = alternative
        self._single = single
        self._planner: Planner | None = None

    def __call__(self, option: Option) -> Assessed:
        search, market = self._search, self._search.market
        problem = problem_of(market, option)
        self._planner = self._planner or Planner(problem, "exact")
        served = option.rate_rps if market.rate_rps is None else market.rate_rps
        solution = self._planner.solve(problem, served)
        used = solution.egress_bps * served / solution.lambda_max_rps
        work = market.workload
        tokens_per_s = served * (work.mean_new_tokens + work.output_tokens)
        usd_per_s = option.usd_per_hour / 3600
        over, sure = None, None
        if self._alternative is not None:
            over = gain_over(option, self._alternative, market)
            if over is not None and option.remote is not None:
                sure = certainty(market, search.traffic, option, self._alternative, over)
        return Assessed(
            option=option,
            solution=solution,
            used_bps=used,
            needed_bps=self._needed_bps(option, solution),
            usd_per_million_tokens=usd_per_s / tokens_per_s * 1e6,
            usd_per_million_output_tokens=usd_per_s / (served * work.output_tokens) * 1e6,
            gain=over,
            over_single=None if self._single is None else gain_over(option, self._single, market),
            certainty=sure,
            lost_sites=lost_sites(
                problem, self._planner.curves, solution.lambda_max_rps, solution.n_prefill
            ),
        )

    def _needed_bps(self, option: Option, solution: Solution) -> float:
        """At the largest rate, with as few offloaded bytes as the local prefill instances allow."""
        if option.remote is None:
            return 0.0
        local = self._search.traffic.of(option.local.place.build)
        allowed = solution.n_prefill * (1 + 1e-9)
        row = int(np.searchsorted(local.short_s * solution.lambda_max_rps, allowed, "right")) - 1
        return float(self._search.traffic.long_bits[row]) * solution.lambda_max_rps


def _nothing(search: Search) -> InputError:
    """Says what is missing: an instance that can serve, or money."""
    market = search.market
    able = [place for place in market.here if search.traffic.of(place.build).decode_rps > 0]
    if not able:
        return InputError(
            f"no accelerator that may be used here decodes {market.output_tokens_per_s:g} tokens/s "
            "for a request",
            where="slo.output_tokens_per_s",
            fix="lower it, or allow larger instances or other accelerators",
        )
    if market.goal is not None:
        return InputError(
            f"no deployment reaches a TTFT of {market.goal.ttft_s:g} s for "
            f"{market.goal.quantile:.0%} of the requests",
            where="slo.ttft_s",
            fix="raise it, raise the budget, or allow other accelerators",
        )
    if market.budget_usd is None:
        return InputError(
            "the GPUs that may be used do not serve this rate",
            where="rate_rps",
            fix="lower it, or allow GPUs to be bought",
        )
    least, place = min(
        ((float(p.supply.cost(np.array(2.0 * p.build.gpus))), p) for p in able),
        key=lambda found: found[0],
    )
    size = f"two instances of {place.build.title}, one to prefill and one to decode"
    if place.supply.buy_usd is None and place.supply.free_gpus < 2 * place.build.gpus:
        return InputError(
            f"the smallest deployment needs {size}; fewer GPUs are owned and none may be bought",
            where="owned",
            fix="allow GPUs to be bought, or use smaller instances (--gpus-per-instance) or "
            "weights of fewer bits (--weights fp8)",
        )
    return InputError(
        f"${market.budget_usd:g} per hour do not pay for the smallest deployment, {size}",
        where="budget_usd_per_hour",
        fix=f"give at least ${least:.2f} per hour",
    )
