"""Finds the best deployments: the same choice as trying every number of every GPU, without doing so.

Pairs of builds with a link are tried in the order of their bounds (`bounds`), until no bound allows a
better option than those that are known. `counts` finds the whole numbers of instances of one pair.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from prfaas.advisor import bounds
from prfaas.advisor.counts import Counts
from prfaas.advisor.market import LinkChoice, Market, Place
from prfaas.advisor.option import Option, better
from prfaas.advisor.work import TrafficWork, coarsened

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


class Search:
    """Searches one market. The work of a build is computed once."""

    def __init__(self, market: Market) -> None:
        self.market = replace(market, workload=coarsened(market.workload))
        self.traffic = TrafficWork(self.market.workload, market.spec)
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
        )

    def singles(self) -> tuple[Option, ...]:
        """The best PD cluster of each accelerator and site, best first."""
        best = _Best(self.market)
        for place in self.market.places:
            key = (place.build.accelerator, place.supply.site)
            best.add(key, self._counts.single(place))
        return best.in_order()

    def pairs(self) -> list[Pair]:
        """All pairs that could exist, the most promising first."""
        found = []
        for here, there in itertools.product(self.market.here, self.market.there):
            local = self.traffic.of(here.build)
            if local.decode_rps == 0:
                continue
            near, far = bounds.gpus_per_rps(here, there, local, self.traffic.of(there.build))
            for link in self.market.links:
                rate = bounds.link_rate(self.traffic.long_bits, link)[:-1]
                found.append(
                    Pair(here, there, link, self._bound(here, there, link, near, far, rate))
                )
        ascending = self.market.rate_rps is not None
        found.sort(key=lambda pair: pair.bound if ascending else -pair.bound)
        return found

    def _bound(
        self,
        here: Place,
        there: Place,
        link: LinkChoice,
        near: bounds.Array,
        far: bounds.Array,
        link_rate: bounds.Array,
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
        """True if no deployment within the bound is as good as the limit."""
        if self.market.budget_usd is not None:
            return bound < limit * (1 - 1e-9)
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
        the best few kinds, or the best with one accelerator in both places. None: anything does."""
        rivals = [self.options[key]] if key in self.options else []
        if key[0] == key[1]:
            rivals += [option for other, option in self.options.items() if len(set(other)) == 1]
        elif len(self.options) >= SHOWN:
            rivals.append(self.in_order()[SHOWN - 1])
        if not rivals:
            return None
        best = _in_order(rivals, self._market)[0]
        return best.rate_rps if self._market.budget_usd is not None else best.usd_per_hour

    def in_order(self) -> tuple[Option, ...]:
        return _in_order(list(self.options.values()), self._market)


def _in_order(options: list[Option], market: Market) -> tuple[Option, ...]:
    """Best first."""
    order = functools.cmp_to_key(lambda a, b: -1 if better(a, b, market) else 1)
    return tuple(sorted(options, key=order))
