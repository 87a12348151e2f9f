"""Routing over sets of nodes that cannot hand off to each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.explain import explain
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.sets import (
    has_room_alone,
    only_nodes,
    predict_ttft_s,
    route_in_set,
    route_in_sets,
    serve_alone,
)
from prfaas.scheduler.short_term import route
from prfaas.scheduler.view import View
from prfaas.scheduler.waiting import HeldWork, Hold
from prfaas.types import NodeId
from tests.scheduler.views import (
    LOCAL,
    NEAR,
    PLAN,
    REMOTE,
    Hit,
    policies,
    requests,
    state,
    view,
    views,
)

# Which set each node belongs to.
splits = st.lists(st.integers(0, 2), min_size=6, max_size=6)


def parts(seen: View, split: Sequence[int]) -> list[View]:
    """The views of the sets that have a PD node."""
    named = list(zip(LOCAL + REMOTE, split, strict=True))
    sets = [{node for node, at in named if at == number} for number in sorted(set(split))]
    return [only_nodes(seen, nodes) for nodes in sets if nodes & set(LOCAL)]


def nodes_of(seen: View) -> set[NodeId]:
    return {n.node for c in (seen.local, *seen.remotes) for n in c.nodes}


@given(requests, views, policies, splits)
def test_every_route_stays_within_one_set(
    request: Request, seen: View, policy: str, split: list[int]
) -> None:
    how = state(policy)
    sets = parts(seen, split)
    found = route_in_sets(request, sets, PLAN, how)
    assert found.view in sets
    if isinstance(found.taken, Hold):
        assert found.taken.cluster is not None or not any(
            n.usable for part in sets for n in part.local.nodes
        ), "a PD node that is usable can serve alone"
        return
    used = {found.taken.prefill, found.taken.decode}
    used |= {node for copy in found.taken.copies for node in (copy.source, copy.target)}
    assert used <= nodes_of(found.view)
    assert found.alone == (found.taken.prefill == found.taken.decode)


@given(requests, views, policies, splits)
def test_the_earliest_first_token_wins(
    request: Request, seen: View, policy: str, split: list[int]
) -> None:
    how = state(policy)
    sets = parts(seen, split)
    found = route_in_sets(request, sets, PLAN, how)
    each = [route_in_set(request, part, PLAN, how) for part in sets]
    offered = [predict_ttft_s(request, one, how) for one in each if isinstance(one.taken, Route)]
    assert isinstance(found.taken, Route) == bool(offered)
    if offered:
        assert predict_ttft_s(request, found, how) == min(offered)


@given(requests, views, policies)
def test_one_set_is_routed_as_the_whole_deployment(
    request: Request, seen: View, policy: str
) -> None:
    how = state(policy)
    (whole,) = parts(seen, [0] * 6)
    found = route_in_sets(request, [whole], PLAN, how)
    as_ever = route(request, seen, PLAN, how)
    if found.alone:
        assert isinstance(as_ever, Hold) and as_ever.cluster is None
    else:
        assert found.taken == as_ever
    ours, theirs = (explain(found, [each], request, PLAN, how) for each in (whole, seen))
    assert ours.alternatives == theirs.alternatives


def alone(*nodes: NodeId, **more: object) -> View:
    return only_nodes(view(**more), set(nodes))  # type: ignore[arg-type]


def test_alone_the_node_with_the_earliest_first_token_serves() -> None:
    seen = alone(*LOCAL[2:], free_at_s={LOCAL[2]: 130.0})
    found = serve_alone(Request(1, 2000), seen, state("paper"))
    assert isinstance(found, Route)
    assert (found.prefill, found.decode, found.offloaded) == (LOCAL[3], LOCAL[3], False)
    assert (found.transfer_tokens, found.nbytes, found.copies) == (0, 0, ())
    cached = alone(*LOCAL[2:], cached={LOCAL[2]: Hit(1920, 1920)})
    found = serve_alone(Request(1, 2000), cached, state("paper"))
    assert isinstance(found, Route) and (found.prefill, found.cached_tokens) == (LOCAL[2], 1920)


def test_alone_a_full_node_is_passed_over() -> None:
    seen = alone(*LOCAL[2:])
    full = [n._replace(active=n.slots) if n.node == LOCAL[2] else n for n in seen.local.nodes]
    seen = seen._replace(local=seen.local.with_nodes(full))
    found = serve_alone(Request(1, 2000), seen, state("paper"))
    assert isinstance(found, Route) and found.decode == LOCAL[3]


def test_no_pd_node_serves_nothing_alone() -> None:
    assert serve_alone(Request(1, 2000), alone(*REMOTE), state("paper")) is None
    dead = alone(LOCAL[2], dead=frozenset(LOCAL))
    assert serve_alone(Request(1, 2000), dead, state("paper")) is None


@pytest.mark.parametrize("policy", ["paper", "adaptive"])
def test_a_node_alone_gets_no_longer_queue_than_any_other(policy: str) -> None:
    """Policy adaptive holds requests back from long queues, and from overdue ones."""
    busy = alone(LOCAL[2], free_at_s={LOCAL[2]: 190.0})
    found = serve_alone(Request(1, 2000, 100.0), busy, state(policy))
    assert isinstance(found, Hold) == (policy == "adaptive")
    if isinstance(found, Hold):
        assert found.cluster == NEAR and found.work_s > 0
    others = HeldWork((1.0,) + (0.0,) * 7, first=0.0)
    free = alone(LOCAL[2], held={NEAR: others})
    found = serve_alone(Request(1, 2000, 100.0), free, state(policy))
    assert isinstance(found, Hold) == (policy == "adaptive")


def test_room_of_a_set_that_serves_alone() -> None:
    how = state("adaptive")
    assert has_room_alone(alone(LOCAL[2]), how)
    assert has_room_alone(alone(LOCAL[0]), how)
    assert not has_room_alone(alone(LOCAL[2], free_at_s={LOCAL[2]: 190.0}), how)
    assert not has_room_alone(alone(LOCAL[2], dead=frozenset(LOCAL)), how)
    assert not has_room_alone(alone(LOCAL[0], LOCAL[2]), how), "it hands off, and is not alone"
