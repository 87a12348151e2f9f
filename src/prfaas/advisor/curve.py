"""What more or less money would buy of an option's hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prfaas.advisor.counts import Counts
from prfaas.advisor.market import Market
from prfaas.advisor.option import Option
from prfaas.advisor.work import TrafficWork, coarsened


def rates_for_money(
    market: Market, options: Sequence[Option], usd: Sequence[float]
) -> list[list[float]]:
    """For each option, the largest rate that each amount of money per hour buys of its accelerators
    and instance sizes, over its link. 0: it does not pay for a deployment."""
    traffic = TrafficWork(coarsened(market.workload), market.spec)
    market = replace(market, workload=traffic.workload, rate_rps=None)
    return [
        [_rate(Counts(replace(market, budget_usd=one), traffic), option) for one in usd]
        for option in options
    ]


def _rate(counts: Counts, option: Option) -> float:
    alone = counts.single(option.local.place)
    found = alone
    if option.remote is not None and option.link is not None:
        # A site that would be idle is not bought, so the PD cluster alone is the least.
        found = counts.pair(option.local.place, option.remote.place, option.link, None) or alone
    return 0.0 if found is None else found.rate_rps
