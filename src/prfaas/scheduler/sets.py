"""Routing where nodes cannot hand off to every other node: during a rolling upgrade. Pure.

The nodes of one KV format are a *set*, and hand-offs and prefix copies stay within a set. Each set
is routed as if it were the whole deployment, and the request takes the earliest predicted first
token, so that every set gets requests as it has capacity. A set that lacks a prefill or a decode
node serves requests *alone*: one PD node prefills and decodes, whatever its role.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from prfaas.scheduler.adaptive import make_hold, others_are_overdue
from prfaas.scheduler.forecast import forecast
from prfaas.scheduler.options import NO_COPIES, Option
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.short_term import route, shortest_wait_s
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, NodeView, View
from prfaas.scheduler.waiting import Hold
from prfaas.types import NodeId

ALONE = "no other node can share its work: one node prefills and decodes"


class Choice(NamedTuple):
    """A decision, and the set that it was made for."""

    taken: Route | Hold
    view: View  # of the set
    alone: bool  # one node prefills and decodes


def only_nodes(view: View, nodes: Collection[NodeId]) -> View:
    """The same view without the nodes of other sets."""

    def chosen(cluster: ClusterView) -> ClusterView:
        return cluster.with_nodes([node for node in cluster.nodes if node.node in nodes])

    remotes = tuple([chosen(remote) for remote in view.remotes])
    return view._replace(local=chosen(view.local), remotes=remotes)


def route_in_sets(
    request: Request, views: Sequence[View], plan: Plan, state: ShortTermState
) -> Choice:
    """The earliest first token that a set offers. The hold that comes first, where every set holds
    the request. There must be a set."""
    best: Choice | None = None
    best_s = float("inf")
    held: Choice | None = None
    for view in views:
        found = route_in_set(request, view, plan, state)
        if isinstance(found.taken, Hold):
            if held is None or _comes_before(found.taken, held.taken):
                held = found
            continue
        first_token_s = predict_ttft_s(request, found, state)
        if best is None or first_token_s < best_s:
            best, best_s = found, first_token_s
    found_one = best or held
    assert found_one is not None
    return found_one


def route_in_set(request: Request, view: View, plan: Plan, state: ShortTermState) -> Choice:
    taken = route(request, view, plan, state)
    if isinstance(taken, Hold) and taken.cluster is None:
        alone = serve_alone(request, view, state)
        if alone is not None:
            return Choice(alone, view, True)
    return Choice(taken, view, False)


def _comes_before(one: Hold, other: Route | Hold) -> bool:
    assert isinstance(other, Hold)
    return (one.cluster is None, one.precedence) < (other.cluster is None, other.precedence)


def predict_ttft_s(request: Request, choice: Choice, state: ShortTermState) -> float:
    """Seconds to the first token of a route. A fuller batch steps more slowly, so that of two sets
    without queues the one with the emptier decode node comes first."""
    taken, view = choice.taken, choice.view
    assert isinstance(taken, Route)
    prefill = view.cluster(taken.cluster).node(taken.prefill)
    decode = view.local.node(taken.decode)
    if choice.alone:
        return _alone_ttft_s(taken, prefill, view)
    start_s = max(view.now_s, prefill.free_at_s)
    if taken.copies:
        start_s = max(start_s, view.now_s + max(copy.seconds for copy in taken.copies))
    option = Option(
        taken.cluster,
        taken.prefill,
        taken.cached_tokens,
        start_s,
        taken.prefill_s,
        taken.copies,
        taken.is_remainder,
    )
    step_s = decode.active / decode.slots * view.costs.t_decode_s
    return forecast(request, option, view, state).ttft_s + step_s


# One node prefills and decodes -------------------------------------------------------------------


def serve_alone(request: Request, view: View, state: ShortTermState) -> Route | Hold | None:
    """The PD node with the earliest first token, if it prefills and decodes the request itself. A
    hold where policy `adaptive` would hold the request back from such a queue. None if no PD node
    is usable."""
    best: Route | None = None
    best_node: NodeView | None = None
    best_s = float("inf")
    seconds = view.costs.prefill_s[view.local.cluster]
    tokens = request.prompt_tokens
    for node in view.local.nodes:
        if not node.usable:
            continue
        held = view.cached.get(node.node)
        own = 0 if held is None else min(held.tokens, tokens - 1)
        found = Route(
            cluster=view.local.cluster,
            prefill=node.node,
            decode_cluster=view.local.cluster,
            decode=node.node,
            offloaded=False,
            cached_tokens=own,
            transfer_tokens=0,
            nbytes=0,
            prefill_s=seconds(tokens - own, own),
            copies=NO_COPIES,
            reason=ALONE,
        )
        found_s = _alone_ttft_s(found, node, view)
        if best is None or found_s < best_s:
            best, best_node, best_s = found, node, found_s
    if best is None or best_node is None or state.rules.policy != "adaptive":
        return best
    start_s = max(view.now_s, best_node.free_at_s)
    option = Option(best.cluster, best.prefill, best.cached_tokens, start_s, best.prefill_s, ())
    if start_s - view.now_s > state.rules.adaptive.queue_s:
        return make_hold(request, option, view, state, "the queue of the only node is long enough")
    if others_are_overdue(request, option, view, state):
        return make_hold(request, option, view, state, "other requests have waited longer")
    return best


def has_room_alone(view: View, state: ShortTermState) -> bool:
    """Whether the requests that wait for the PD cluster are worth a retry, because this set serves
    alone and has room."""
    nodes = [node for node in view.local.nodes if node.usable]
    decodes = any(node.role == "decode" for node in nodes)
    if decodes and shortest_wait_s(view.local, view.now_s) is not None:
        return False
    limit_s = view.now_s + state.rules.adaptive.queue_s
    return any(node.free_at_s <= limit_s for node in nodes)


def _alone_ttft_s(taken: Route, node: NodeView, view: View) -> float:
    costs = view.costs
    slot_s = 0.0
    if node.active >= node.slots:
        slot_s = (node.active - node.slots + 1) / node.slots * costs.mean_hold_s
    step_s = (1 + node.active / node.slots) * costs.t_decode_s
    return max(0.0, node.free_at_s - view.now_s) + taken.prefill_s + slot_s + step_s
