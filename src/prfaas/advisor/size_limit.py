"""The largest deployments that are searched. Without a limit, a budget or a rate with a few zeros
too many would take all memory and time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prfaas.advisor.market import Market, Place
from prfaas.advisor.work import TrafficWork
from prfaas.errors import InputError

MOST_INSTANCES = 10_000  # of one cluster


def within_limit(market: Market, traffic: TrafficWork) -> Market:
    """The market without builds of which a rate would need too many. Raises if none is left, or if
    a budget pays for too many."""
    if market.budget_usd is not None:
        for place in market.places:
            count = int(place.supply.most_gpus(np.array(market.budget_usd))) // place.build.gpus
            if count > MOST_INSTANCES:
                raise InputError(
                    f"${market.budget_usd:,.2f} per hour pay for {count:,} instances of "
                    f"{place.build.title}; at most {MOST_INSTANCES:,} are searched",
                    where="budget_usd_per_hour",
                    fix="lower it, or allow only larger instances (--gpus-per-instance)",
                )
        return market
    needed = {place: _needed(place, market, traffic) for place in market.places}
    if min(needed.values()) > MOST_INSTANCES:
        raise InputError(
            f"{market.rate_rps:,g} requests/s need at least {min(needed.values()):,.0f} instances; "
            f"at most {MOST_INSTANCES:,} are searched",
            where="rate_rps",
            fix="lower it, or allow larger instances (--gpus-per-instance)",
        )
    return replace(
        market,
        here=tuple(place for place in market.here if needed[place] <= MOST_INSTANCES),
        there=tuple(place for place in market.there if needed[place] <= MOST_INSTANCES),
    )


def _needed(place: Place, market: Market, traffic: TrafficWork) -> float:
    """Instances that serve the whole rate: prefill alone, where an instance cannot decode."""
    assert market.rate_rps is not None
    work = traffic.of(place.build)
    rate = market.rate_rps / market.utilisation
    return rate * work.all_s + (rate / work.decode_rps if work.decode_rps else 0.0)
