"""Routing where nodes cannot hand off to every other node: during a rolling upgrade. Pure.

The nodes of one KV format are a *set*, and hand-offs and prefix copies stay within a set. Each set
is routed as if it were the whole deployment, and the request takes the earliest predicted first
token, so that every set gets requests as it has capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from prfaas.scheduler.forecast import forecast
from prfaas.scheduler.options import Option
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.short_term import route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, View
from prfaas.scheduler.waiting import Hold
from prfaas.types import NodeId


class Choice(NamedTuple):
    """A decision, and the set that it was made for."""

    taken: Route | Hold
    view: View  # of the set


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
        found = Choice(route(request, view, plan, state), view)
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
        taken.alone,
    )
    step_s = decode.active / decode.slots * view.costs.t_decode_s
    return forecast(request, option, view, state).ttft_s + step_s
