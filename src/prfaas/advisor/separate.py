"""Two PD clusters that share the traffic: what owned GPUs of two types or sites do without PrfaaS.

Without owned GPUs a single cluster of the better type is as good, so one of the two has some.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from prfaas.advisor.counts import Counts
from prfaas.advisor.market import Market, Place
from prfaas.advisor.option import Group, Separate, better
from prfaas.advisor.work import TrafficWork


def best_separate(market: Market, traffic: TrafficWork) -> Separate | None:
    places = [place for place in market.places if traffic.of(place.build).decode_rps > 0]
    best: Separate | None = None
    for one, other in itertools.permutations(places, 2):
        if one.supply.free_gpus < 2 * one.build.gpus or one.supply == other.supply:
            continue
        for found in _divided(market, traffic, one, other):
            if best is None or better(found, best, market):
                best = found
    return best


def _divided(market: Market, traffic: TrafficWork, one: Place, other: Place) -> Iterator[Separate]:
    """A cluster of owned GPUs, of every size, and the best other one beside it."""
    most = one.supply.free_gpus // one.build.gpus
    # A TTFT goal takes long to check; then all owned GPUs are used.
    for instances in range(2 if market.goal is None else most, most + 1):
        group = Group(one, instances)
        owned = replace(one, supply=replace(one.supply, buy_usd=None, owned=group.gpus))
        spend = replace(market, budget_usd=group.usd_per_hour, rate_rps=None)
        first = Counts(spend, traffic).single(owned)
        if first is None:
            continue
        if market.budget_usd is not None:
            left = replace(market, budget_usd=market.budget_usd - first.usd_per_hour)
        elif market.rate_rps is not None and first.rate_rps < market.rate_rps:
            left = replace(market, rate_rps=market.rate_rps - first.rate_rps)
        else:
            return
        second = Counts(left, traffic).single(other)
        if second is not None:
            yield Separate(first, second)
