"""Decoding in another PD cluster than the one at which a request arrives. Pure.

A request decodes at its home. It goes elsewhere only where the home cannot serve it: no node there
decodes, no node can prefill for it, or every decode node is full. That costs a round trip between
the two PD clusters, which therefore must be known. A longer queue at home is no reason: the plan
has given every PD cluster capacity for its own traffic, and a request that goes elsewhere takes it
from the requests there. For the same reason a home that is only full uses no prefill node elsewhere
that is busy: a flood at one home must not queue before the requests of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from prfaas.config import Deployment
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.sets import Choice, predict_ttft_s
from prfaas.scheduler.short_term import route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import LinkId, View
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId

Decide: TypeAlias = Callable[[Request, View, Plan, ShortTermState], Choice]


def decide_by_route(request: Request, view: View, plan: Plan, state: ShortTermState) -> Choice:
    return Choice(route(request, view, plan, state), view, False)


def round_trips(deployment: Deployment) -> dict[LinkId, float]:
    """Seconds between every two pd clusters that have a link, whichever direction it is stated
    for."""
    names = [cluster.name for cluster in deployment.of_kind("pd")]
    found: dict[LinkId, float] = {}
    for one, other in itertools.permutations(names, 2):
        link = deployment.link(one, other) or deployment.link(other, one)
        if link is not None:
            found[ClusterId(one), ClusterId(other)] = link.rtt_ms / 1e3
    return found


class HomeContext(NamedTuple):
    """What a decision for one PD cluster uses."""

    view: View
    plan: Plan
    state: ShortTermState
    round_trip_s: float = 0.0  # from the PD cluster at which the request arrived


def route_from(
    request: Request,
    home: HomeContext,
    others: Callable[[], Iterable[HomeContext]],
    decide: Decide = decide_by_route,
) -> Choice:
    """The route of a request that arrives at `home`, or its hold. `others` yields the PD clusters
    that may decode it instead; it is called only where that is of use. A request that no PD cluster
    can serve waits for its home, so that the requests of a lost site do not stand before those of
    other sites. `decide` decides for one PD cluster."""
    choice = decide(request, home.view, home.plan, home.state)
    found = choice.taken
    if isinstance(found, Hold):
        if found.cluster is not None:
            return choice
        waits = choice._replace(taken=found._replace(cluster=home.view.local.cluster))
        if not home.state.rules.decode_elsewhere:
            return waits
        return _serve_elsewhere(request, others(), decide) or waits
    if not home.state.rules.decode_elsewhere or _has_decode_room(request, found, home.view):
        return choice
    here_s = predict_ttft_s(request, choice, home.state)
    roomy = (other for other in others() if _can_decode_now(request, other.view))
    taken = _serve_elsewhere(request, roomy, decide, sooner_than_s=here_s)
    return choice if taken is None or not _is_unused(taken) else taken


def _serve_elsewhere(
    request: Request,
    others: Iterable[HomeContext],
    decide: Decide,
    sooner_than_s: float = float("inf"),
) -> Choice | None:
    """The earliest first token among the other PD clusters. A hold, if each of them would hold the
    request, or if a decode slot is free earlier where it would be held: a PD cluster whose prefill
    nodes are idle must not draw more requests than it can decode. None if none of them can serve
    it."""
    best: Choice | None = None
    held: Choice | None = None
    best_s = sooner_than_s
    best_slot_s = held_slot_s = float("inf")
    for other in others:
        choice = decide(request, other.view, other.plan, other.state)
        found = choice.taken
        slot_s = _slot_wait_s(other.view)
        if isinstance(found, Hold):
            if found.cluster is not None and slot_s < held_slot_s:
                held, held_slot_s = choice, slot_s
            continue
        ttft_s = predict_ttft_s(request, choice, other.state) + other.round_trip_s
        if ttft_s < best_s:
            reason = f"its home cannot serve it; at {other.view.local.cluster}: {found.reason}"
            taken = found._replace(round_trip_s=other.round_trip_s, reason=reason)
            best = choice._replace(taken=taken)
            best_s, best_slot_s = ttft_s, slot_s
    return held if best is None or held_slot_s < best_slot_s else best


def _is_unused(choice: Choice) -> bool:
    """Whether nothing waits for what the route uses of the other PD cluster. Of PrfaaS clusters
    every home has its share, wherever its requests decode."""
    found, view = choice.taken, choice.view
    if isinstance(found, Hold):
        return False
    if found.cluster != view.local.cluster:
        return True
    return view.local.node(found.prefill).free_at_s <= view.now_s


def _slot_wait_s(view: View) -> float:
    """Seconds until a request has a decode slot there. Infinite without a decode node."""
    ranks = view.local.ranks()
    if not ranks.active.nodes:
        return float("inf")
    node = view.local.node(ranks.name(ranks.active.least()[1]))
    return max(node.active + 1 - node.slots, 0) / node.slots * view.costs.mean_hold_s


def _has_decode_room(request: Request, taken: Route, view: View) -> bool:
    """Whether the decode node of a route has a slot and memory, so that the request does not wait
    for another one to end."""
    node = view.local.node(taken.decode)
    return node.active < node.slots and node.free_kv_bytes >= _kv_bytes(request, view)


def _can_decode_now(request: Request, view: View) -> bool:
    ranks = view.local.ranks()
    if not ranks.active.nodes:
        return False
    node = view.local.node(ranks.name(ranks.active.least()[1]))
    return node.active < node.slots and node.free_kv_bytes >= _kv_bytes(request, view)


def _kv_bytes(request: Request, view: View) -> float:
    return request.prompt_tokens * view.costs.bytes_per_token
