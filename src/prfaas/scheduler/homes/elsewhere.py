"""Decoding in another PD cluster than the one at which a request arrives. Pure.

A request decodes at its home. It goes elsewhere only where the home cannot serve it: no node there
decodes, every decode node is full, or a decode node would have to prefill for itself because no
prefill node can, and another PD cluster is sooner. That costs a round trip between
the two PD clusters, which therefore must be known. A longer queue at home is no reason: the plan
has given every PD cluster capacity for its own traffic, and a request that goes elsewhere takes it
from the requests there.

A full home may be full because its requests flood it. So another PD cluster takes its requests only
while that costs its own requests nearly nothing: beyond a reserve of decode slots, and with an idle
prefill node or link. The requests of a home that has lost its nodes may wait there in line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route, alone_reason
from prfaas.scheduler.sets import Choice, predict_ttft_s
from prfaas.scheduler.short_term import route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import View
from prfaas.scheduler.waiting import Hold

ELSEWHERE = "its home cannot serve it"  # the beginning of a reason
Decide: TypeAlias = Callable[[Request, View, Plan, ShortTermState], Choice]


def decide_by_route(request: Request, view: View, plan: Plan, state: ShortTermState) -> Choice:
    return Choice(route(request, view, plan, state), view)


# Decode slots that a PD cluster keeps free of requests of full homes: so many standard deviations
# of its own planned number of requests there, but at most this part of its slots.
_RESERVE_DEVIATIONS = 2.0
_LARGEST_RESERVE = 0.25


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
        if not home.state.rules.decode_elsewhere:
            return choice
        return _serve_elsewhere(request, others(), decide) or choice
    if not home.state.rules.decode_elsewhere:
        return choice
    if found.is_last_resort and alone_reason(request) is None:
        here_s = predict_ttft_s(request, choice, home.state)
        taken = _serve_elsewhere(request, others(), decide, sooner_than_s=here_s)
        return choice if taken is None or isinstance(taken.taken, Hold) else taken
    if _has_decode_room(request, found, home.view):
        return choice
    here_s = predict_ttft_s(request, choice, home.state)
    roomy = (other for other in others() if _takes_guests(request, other))
    taken = _serve_elsewhere(request, roomy, decide, sooner_than_s=here_s, idle_only=True)
    return choice if taken is None or isinstance(taken.taken, Hold) else taken


def route_elsewhere(
    request: Request, others: Iterable[HomeContext], decide: Decide = decide_by_route
) -> Choice | None:
    """The choice for a request whose home has no plan. None if no other PD cluster can serve it."""
    return _serve_elsewhere(
        request, (other for other in others if other.state.rules.decode_elsewhere), decide
    )


def _serve_elsewhere(
    request: Request,
    others: Iterable[HomeContext],
    decide: Decide,
    *,
    sooner_than_s: float = math.inf,
    idle_only: bool = False,
) -> Choice | None:
    """The earliest first token among the other PD clusters. A hold, if each of them would hold the
    request, or if a decode slot is free earlier where it would be held: a PD cluster whose prefill
    nodes are idle must not draw more requests than it can decode. None if none of them can serve
    it. `idle_only`: only with a prefill node or a link that is idle."""
    best: Choice | None = None
    held: Choice | None = None
    best_s = sooner_than_s
    best_slot_s = held_slot_s = math.inf
    for other in others:
        choice = decide(request, other.view, other.plan, other.state)
        found = choice.taken
        slot_s = _slot_wait_s(other.view)
        if isinstance(found, Hold):
            if found.cluster is not None and slot_s < held_slot_s:
                held, held_slot_s = choice, slot_s
            continue
        if idle_only and _is_in_the_way(request, found, other):
            continue
        ttft_s = predict_ttft_s(request, choice, other.state) + other.round_trip_s
        if ttft_s < best_s:
            reason = f"{ELSEWHERE}; at {other.view.local.cluster}: {found.reason}"
            taken = found._replace(round_trip_s=other.round_trip_s, reason=reason)
            best = choice._replace(taken=taken)
            best_s, best_slot_s = ttft_s, slot_s
    return held if best is None or held_slot_s < best_slot_s else best


def _slot_wait_s(view: View) -> float:
    """Seconds until a request has a decode slot there. Infinite without a decode node."""
    ranks = view.local.ranks()
    if not ranks.active.nodes:
        return math.inf
    node = view.local.node(ranks.name(ranks.active.least()[1]))
    return max(node.active + 1 - node.slots, 0) / node.slots * view.costs.mean_hold_s


def _has_decode_room(request: Request, taken: Route, view: View) -> bool:
    """Whether the decode node of a route has a slot and memory, so that the request does not wait
    for another one to end."""
    node = view.local.node(taken.decode)
    return node.active < node.slots and node.free_kv_bytes >= _kv_bytes(request, view)


def _is_in_the_way(request: Request, taken: Route, other: HomeContext) -> bool:
    """Whether the route takes something that requests of the other PD cluster itself use now: a
    busy prefill node of its own, or a link to it with bytes on the way. Also whether it takes a
    prefill node for longer than the plan expects of a request there. Nodes of PrfaaS clusters are
    shared in another way (`fair_shares`)."""
    view = other.view
    if taken.offloaded:
        return view.links[taken.cluster, view.local.cluster].pending_bytes > 0
    if taken.alone and view.local.node(taken.decode).active:
        return True  # they would wait for the prefill
    is_long = request.prompt_tokens - taken.cached_tokens > other.plan.threshold_tokens
    return is_long or view.local.node(taken.prefill).free_at_s > view.now_s


def _takes_guests(request: Request, other: HomeContext) -> bool:
    """Whether a PD cluster has decode slots to spare for requests of a full home. It keeps a
    reserve for its own requests, whose number fluctuates by about the square root of the number
    that the plan expects in its slots. The reserve is at most a part of the slots, so that a small
    PD cluster can help, too."""
    view = other.view
    nodes = [node for node in view.local.nodes if node.usable and node.role == "decode"]
    slots = sum(node.slots for node in nodes)
    planned = other.plan.capacity_rps * view.costs.mean_hold_s
    reserve = min(_RESERVE_DEVIATIONS * math.sqrt(planned), _LARGEST_RESERVE * slots)
    free = slots - sum(node.active for node in nodes)
    return free > reserve and _can_decode_now(request, view)


def _can_decode_now(request: Request, view: View) -> bool:
    ranks = view.local.ranks()
    if not ranks.active.nodes:
        return False
    node = view.local.node(ranks.name(ranks.active.least()[1]))
    return node.active < node.slots and node.free_kv_bytes >= _kv_bytes(request, view)


def _kv_bytes(request: Request, view: View) -> float:
    return request.prompt_tokens * view.costs.bytes_per_token
