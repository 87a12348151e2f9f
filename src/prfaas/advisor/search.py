"""Finds the best deployments: the same choice as trying every number of every GPU, but faster.

Pairs of builds with a link are tried in the order of their bounds (`bounds`), until no bound allows
a better option than those that are known. `counts` finds the whole numbers of instances of a pair.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from prfaas.advisor import bounds
from prfaas.advisor.counts import Counts
from prfaas.advisor.market import Array, LinkChoice, Market, Place
from prfaas.advisor.option import Alternative, Option, Separate, better
from prfaas.advisor.separate import best_separate
from prfaas.advisor.work import TrafficWork, coarsened, worth

SHOWN = 5  # PrfaaS options, each with another pair of accelerators


class Pair(NamedTuple):
    """A PD build, a PrfaaS build and a link, with the best that they could reach."""

    here: Place
    there: Place
    link: LinkChoice
    bound: float  # with a budget: a rate that they do not exceed; with a rate: their least cost


Progress = Callable[[Sequence[Pair]], Iterable[Pair]]


@dataclass(frozen=True, slots=True)
class Found:
    """The best options of each kind, best first."""

    prfaas: tuple[Option, ...]  # each with another pair of accelerators
    same: Option | None  # PrfaaS with one accelerator in both places
    singles: tuple[Option, ...]  # one PD cluster, each with another accelerator or site
    separate: Separate | None  # two PD clusters without a link; only with owned GPUs

    def alternative(self, market: Market) -> Alternative | None:
        """The best that can be had without PrfaaS."""
        single = self.singles[0] if self.singles else None
        if single is None or self.separate is None:
            return single or self.separate
        return self.separate if better(self.separate, single, market) else single


class Search:
    """Searches one market. The work of a build is computed once."""

    def __init__(self, market: Market, traffic: TrafficWork | None = None) -> None:
        self.traffic = traffic or TrafficWork(coarsened(market.workload), market.spec)
        self.market = replace(market, workload=self.traffic.workload)
        self._counts = Counts(self.market, self.traffic)

    def run(self, progress: Progress = iter) -> Found:
        best = _Best(self.market)
        for pair in progress(self.pairs()):
            key = (pair.here.build.accelerator, pair.there.build.accelerator)
            limit = best.limit(key)
            if limit is None or not self._beyond(pair.bound, limit):
                option = self._counts.pair(pair.here, pair.there, pair.link, limit)
                best.add(key, option)
        same = [option for key, option in best.options.items() if len(set(key)) == 1]
        return Found(
            prfaas=best.in_order()[:SHOWN],
            same=_in_order(same, self.market)[0] if same else None,
            singles=self.singles(),
            separate=best_separate(self.market, self.traffic),
        )

    def singles(self) -> tuple[Option, ...]:
        """The best PD cluster of each accelerator and site, best first."""
        best = _Best(self.market)
        near = {(place.build, replace(place.supply, site="there")) for place in self.market.here}
        for place in self.market.places:
            # The same GPUs for the same money at the other site are not another option.
            if place.supply.site == "here" or (place.build, place.supply) not in near:
                key = (place.build.accelerator, place.supply.site)
                best.add(key, self._counts.single(place))
        return best.in_order()

    def reaches(self, limit: float) -> bool:
        """Whether a deployment of two sites has this rate for the budget, or costs no more for the
        rate."""
        for pair in self.pairs():
            if self._beyond(pair.bound, limit):
                return False
            option = self._counts.pair(pair.here, pair.there, pair.link, limit)
            # The one of most worth may have a smaller rate.
            if option is not None and (
                self.market.budget_usd is None or option.rate_rps >= limit * (1 - 1e-9)
            ):
                return True
        return False

    def best_prfaas(self) -> Option | None:
        """The best deployment of two sites, alone."""
        best: Option | None = None
        for pair in self.pairs():
            limit = None if best is None else merit(best, self.market)
            if limit is not None and self._beyond(pair.bound, limit):
                break
            option = self._counts.pair(pair.here, pair.there, pair.link, limit)
            if option is not None and (best is None or better(option, best, self.market)):
                best = option
        return best

    def pairs(self, only: LinkChoice | None = None) -> list[Pair]:
        """All pairs that could exist, or all with this link, the most promising first."""
        links = self.market.links if only is None else (only,)
        full = {link: bounds.link_rate(self.traffic.long_bits, link)[:-1] for link in links}
        found = []
        for here, there in itertools.product(self.market.here, self.market.there):
            local = self.traffic.of(here.build)
            if local.decode_rps == 0:
                continue
            near, far = bounds.gpus_per_rps(here, there, local, self.traffic.of(there.build))
            for link in links:
                bound = self._bound(here, there, link, near, far, full[link])
                found.append(Pair(here, there, link, bound))
        ascending = self.market.rate_rps is not None
        found.sort(key=lambda pair: pair.bound if ascending else -pair.bound)
        return found

    def _bound(
        self,
        here: Place,
        there: Place,
        link: LinkChoice,
        near: Array,
        far: Array,
        link_rate: Array,
    ) -> float:
        supplies = (here.supply, there.supply)
        if self.market.budget_usd is not None:
            usd = self.market.budget_usd - link.usd_per_hour
            most = bounds.largest_rate(usd, near, far, *supplies, link_rate)
            return most * self.market.utilisation
        assert self.market.rate_rps is not None, "a market has a budget or a rate"
        rate = self.market.rate_rps / self.market.utilisation
        return link.usd_per_hour + bounds.least_cost(rate, near, far, *supplies, link_rate)

    def _beyond(self, bound: float, limit: float) -> bool:
        """True if no deployment within the bound is as good as the limit (`merit`)."""
        if self.market.budget_usd is not None:
            return worth(bound, True) < limit * (1 - 1e-9)
        return bound > limit + 1e-9


class _Best:
    """The best option of each kind of hardware."""

    def __init__(self, market: Market) -> None:
        self._market = market
        self.options: dict[tuple[str, str], Option] = {}

    def add(self, key: tuple[str, str], option: Option | None) -> None:
        if option is not None:
            known = self.options.get(key)
            if known is None or better(option, known, self._market):
                self.options[key] = option

    def limit(self, key: tuple[str, str]) -> float | None:
        """What another option of this kind must reach to matter: be the best of its kind, and among
        the best few kinds or the best with one accelerator in both places. None: anything does."""
        known = [self.options[key]] if key in self.options else []
        if len(self.options) >= SHOWN:
            few = self.in_order()[SHOWN - 1]
            same = [option for other, option in self.options.items() if other[0] == other[1]]
            if key[0] != key[1]:
                known.append(few)
            elif same:
                known.append(_in_order([few, _in_order(same, self._market)[0]], self._market)[-1])
        return merit(_in_order(known, self._market)[0], self._market) if known else None

    def in_order(self) -> tuple[Option, ...]:
        return _in_order(list(self.options.values()), self._market)


def merit(option: Option, market: Market) -> float:
    """What is compared: with a budget the worth of the rate, with a rate the cost."""
    return option.worth if market.budget_usd is not None else option.usd_per_hour


def _in_order(options: list[Option], market: Market) -> tuple[Option, ...]:
    """Best first."""

    def compare(one: Option, other: Option) -> int:
        return -1 if better(one, other, market) else 1

    return tuple(sorted(options, key=functools.cmp_to_key(compare)))
