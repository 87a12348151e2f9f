"""Which PrfaaS cluster an offloaded request goes to, so that each gets its planned share. Pure.

Every link has a credit: the uncached tokens that the plan's shares would have sent over it, less
those that were sent. The next request goes over the link with the most credit, whatever its length,
so that prefill time and bytes both follow the shares. Requests that wait for a cluster count as
sent. Otherwise all requests would wait for the cluster whose turn it is, and the others would be
idle. A cluster that cannot be reached gains no
credit: when it returns, it has nothing to catch up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.scheduler.options import Option
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.view import View
from prfaas.types import ClusterId

# A cluster that holds a longer prefix of the prompt than the others is preferred while it is ahead
# of its share by no more than this many thresholds. A prefix that many prompts begin with must not
# draw all requests to one cluster.
_MOST_AHEAD = 16


# Changes of credit, by PrfaaS cluster.
Credits: TypeAlias = tuple[tuple[ClusterId, float], ...]


class Turn(NamedTuple):
    """The option whose turn it is, and how the choice changes the credits."""

    option: Option
    credits: Credits


def choose_by_share(
    options: Sequence[Option], uncached_tokens: int, view: View, plan: Plan
) -> Turn | None:
    """Chooses among the best options of the PrfaaS clusters that can be reached. None where the
    plan sends none of them anything: then the plan does not decide."""
    planned = shares_of(plan)
    shares = [planned.get(option.cluster, 0.0) for option in options]
    total = sum(shares)
    if total <= 0:
        return None
    home = view.local.cluster
    credits = [view.links[option.cluster, home].credit_tokens for option in options]
    if view.held:
        held = [_held_tokens(option.cluster, view, plan) for option in options]
        every = sum(held) / total
        credits = [credits[n] + every * shares[n] - held[n] for n in range(len(options))]
    chosen = _most_credit(options, shares, credits, plan)
    changes = []
    for index, option in enumerate(options):
        change = uncached_tokens * shares[index] / total
        if index == chosen:
            change -= uncached_tokens
        changes.append((option.cluster, change))
    return Turn(options[chosen], tuple(changes))


def shares_of(plan: Plan) -> Mapping[ClusterId, float]:
    """The share of the home's offloaded requests that the plan sends to each PrfaaS cluster."""
    names = (ClusterId(remote.pool.cluster) for remote in plan.problem.remotes)
    return dict(zip(names, plan.shares, strict=True))


def _held_tokens(cluster: ClusterId, view: View, plan: Plan) -> float:
    """About as many uncached tokens as the home's own requests that wait for the cluster have."""
    held = view.held.get(cluster)
    if held is None:
        return 0.0
    threshold = max(plan.threshold_tokens, 1)
    return held.own_s / view.costs.prefill_s[cluster](threshold, 0) * threshold


def _most_credit(
    options: Sequence[Option], shares: Sequence[float], credits: Sequence[float], plan: Plan
) -> int:
    numbers = [number for number, share in enumerate(shares) if share > 0]
    longest = max(options[number].cached_tokens for number in numbers)
    if longest:
        ahead = -_MOST_AHEAD * max(plan.threshold_tokens, 1)
        holders = [n for n in numbers if options[n].cached_tokens == longest and credits[n] > ahead]
        numbers = holders or numbers
    return max(numbers, key=lambda number: (credits[number], shares[number]))
