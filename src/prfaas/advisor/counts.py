"""Whole numbers of instances of given builds and a given link: the best for the money or the rate.

The worth of the rate never falls with the number of instances on either side. So with a budget only
one number of remote instances matters for each number of local ones: the most that the rest of the
money pays for. With a rate to be served, the number of local prefill instances determines the
threshold, and the threshold the least number of remote instances.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from prfaas.advisor.goal import GoalCheck
from prfaas.advisor.market import LinkChoice, Market, Place
from prfaas.advisor.option import Group, Option, better
from prfaas.advisor.work import PairRate, TrafficWork, prfaas_rate, single_rate

_ROUNDING = 1e-9


class Counts:
    def __init__(self, market: Market, traffic: TrafficWork) -> None:
        self._market = market
        self._traffic = traffic
        self._goal = None
        if market.goal is not None:
            self._goal = GoalCheck(market, traffic, market.goal)

    def pair(
        self, here: Place, there: Place, link: LinkChoice, limit: float | None
    ) -> Option | None:
        """The best deployment of two sites. It must reach `limit`: the worth of a rate with a
        budget, a cost with a rate. None: there is no such deployment, or the remote site would be
        idle."""
        if self._goal is not None and self._goal.hopeless(here, there, link):
            return None
        if self._market.budget_usd is not None:
            options = self._pairs_for_budget(here, there, link, limit or 0.0)
        else:
            ceiling = math.inf if limit is None else limit
            options = self._pairs_for_rate(here, there, link, ceiling)
        return _best(options, self._market)

    def single(self, place: Place) -> Option | None:
        """The best PD cluster without a remote site."""
        if self._goal is not None and self._goal.hopeless(place, None, None):
            return None
        return _best(self._singles(place), self._market)

    # With a budget --------------------------------------------------------------------------------

    def _pairs_for_budget(
        self, here: Place, there: Place, link: LinkChoice, floor: float
    ) -> Iterator[Option]:
        """Divides the numbers of local instances into ranges. No deployment of a range is worth
        more than one with the most local and the most remote instances of the range, so that most
        ranges need not be looked into."""
        assert self._market.budget_usd is not None
        usd = self._market.budget_usd - link.usd_per_hour
        local = self._traffic.of(here.build)
        if usd < -_ROUNDING:
            return
        most = int(here.supply.most_gpus(np.array(usd))) // here.build.gpus
        gpus = np.arange(0.0, most + 1) * here.build.gpus
        n_remotes = there.supply.most_gpus(usd - here.supply.cost(gpus)) // there.build.gpus

        def most_worth(first: int, last: int) -> float:
            far = Group(there, int(n_remotes[first]))
            return self._rate(Group(here, last), far, link).worth if far.instances >= 1 else 0.0

        ranges = [(-most_worth(1, most), 1, most)] if most else []
        while ranges:
            negative, first, last = heapq.heappop(ranges)
            if not negative or -negative * self._market.utilisation < floor * (1 - _ROUNDING):
                return  # this was the most promising range
            if first < last:
                middle = (first + last) // 2
                for part in ((first, middle), (middle + 1, last)):
                    heapq.heappush(ranges, (-most_worth(*part), *part))
                continue
            near, far = Group(here, first), Group(there, int(n_remotes[first]))
            rate = self._rate(near, far, link)
            if self._goal is None:
                if rate.rps <= single_rate(local, first) * (1 + _ROUNDING):
                    continue  # the remote site would have nothing to do
                far = self._fewest(near, far, link, rate)
                rate = self._rate(near, far, link)
            option = self._option(near, far, link, rate, floor * rate.rps / rate.worth)
            if option is not None:
                floor = max(floor, option.worth)
                yield option

    def _fewest(self, near: Group, far: Group, link: LinkChoice, rate: PairRate) -> Group:
        """The fewest remote instances with which the rate is worth as much."""
        low, high = 1, far.instances
        while low < high:
            middle = (low + high) // 2
            found = self._rate(near, replace(far, instances=middle), link)
            enough = found.worth >= rate.worth * (1 - _ROUNDING)
            low, high = (low, middle) if enough else (middle + 1, high)
        return replace(far, instances=low)

    # With a rate ----------------------------------------------------------------------------------

    def _pairs_for_rate(
        self, here: Place, there: Place, link: LinkChoice, ceiling: float
    ) -> Iterator[Option]:
        assert self._market.rate_rps is not None
        rate = self._market.rate_rps / self._market.utilisation
        local, remote = self._traffic.of(here.build), self._traffic.of(there.build)
        n_decode = _at_least(rate / local.decode_rps)
        all_local = _at_least(rate * local.all_s)
        n_prefills = np.arange(self._tried(all_local))
        rows = np.searchsorted(local.short_s * rate, n_prefills * (1 + _ROUNDING), "right") - 1
        carried = self._traffic.long_bits[rows] * rate <= link.bps * (1 + _ROUNDING)
        fewest = np.maximum(np.ceil(rate * remote.long_s[rows] - _ROUNDING), 1)
        local_gpus = np.asarray((n_decode + n_prefills) * here.build.gpus, float)
        usd = here.supply.cost(local_gpus) + there.supply.cost(fewest * there.build.gpus)
        usd += link.usd_per_hour
        gpus = local_gpus + fewest * there.build.gpus
        for index in np.lexsort((gpus, usd)):  # the cheapest first
            if usd[index] > ceiling + _ROUNDING:
                return
            if not carried[index]:
                continue
            near = Group(here, n_decode + int(n_prefills[index]))
            least = int(fewest[index])
            # One more where a local prefill instance takes the last requests from the rate.
            for n_remote in range(least, max(self._tried(least), least + 1) + 1):
                far = Group(there, n_remote)
                cost = near.usd_per_hour + far.usd_per_hour + link.usd_per_hour
                if cost > ceiling + _ROUNDING or not _for_sale(near, far):
                    break
                option = self._serving(near, far, link)
                if option is not None:
                    ceiling = min(ceiling, cost)
                    yield option
                    break

    def _serving(self, near: Group, far: Group, link: LinkChoice) -> Option | None:
        """None if the split that the planner chooses does not serve the rate."""
        assert self._market.rate_rps is not None
        rate = self._rate(near, far, link)
        if rate.rps * self._market.utilisation < self._market.rate_rps * (1 - _ROUNDING):
            return None
        return self._option(near, far, link, rate, self._market.rate_rps)

    def _rate(self, near: Group, far: Group, link: LinkChoice) -> PairRate:
        local, remote = (self._traffic.of(group.place.build) for group in (near, far))
        bits = self._traffic.long_bits
        return prfaas_rate(local, remote, bits, near.instances, far.instances, link.bps)

    # One PD cluster -------------------------------------------------------------------------------

    def _singles(self, place: Place) -> Iterator[Option]:
        work = self._traffic.of(place.build)
        if work.decode_rps == 0:
            return
        if self._market.budget_usd is not None:
            most = int(place.supply.most_gpus(np.array(self._market.budget_usd)))
            instances = range(2, most // place.build.gpus + 1)
        else:
            assert self._market.rate_rps is not None
            rate = self._market.rate_rps / self._market.utilisation
            fewest = _at_least(rate / work.decode_rps) + _at_least(rate * work.all_s)
            instances = range(fewest, self._tried(fewest) + 1)
        floor = self._market.rate_rps or 0.0
        for count in reversed(instances) if self._market.budget_usd is not None else instances:
            group = Group(place, count)
            if not _for_sale(group):
                return
            rate = single_rate(work, count)
            if rate * self._market.utilisation < floor * (1 - _ROUNDING):
                return  # fewer instances are never faster
            option = self._option(group, None, None, PairRate(rate, local_prefill=True), floor)
            if option is not None:
                yield option
                if self._market.rate_rps is not None:
                    return  # more instances cost more
                floor = option.rate_rps

    def _tried(self, needed: int) -> int:
        """The most instances that are tried where the rate needs so many: a TTFT goal may need
        more, so that requests wait less."""
        return needed if self._goal is None else 2 * needed + 4

    def _option(
        self,
        local: Group,
        remote: Group | None,
        link: LinkChoice | None,
        rate: PairRate,
        floor: float,
    ) -> Option | None:
        """The deployment with this largest rate. None: a TTFT goal fails at the floor."""
        sustained_rps = rate.rps * self._market.utilisation
        option = Option(local, remote, link, rate.rps, sustained_rps, rate.local_prefill)
        if self._goal is None:
            return option
        sustained = self._goal.sustained(option, floor)
        return None if sustained is None else replace(option, rate_rps=sustained)


def _best(options: Iterator[Option], market: Market) -> Option | None:
    found: Option | None = None
    for option in options:
        if found is None or better(option, found, market):
            found = option
    return found


def _at_least(instances: float) -> int:
    return max(1, math.ceil(instances - _ROUNDING))


def _for_sale(*groups: Group) -> bool:
    return all(
        group.supply.buy_usd is not None or group.gpus <= group.supply.free_gpus for group in groups
    )
