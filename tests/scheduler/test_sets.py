"""Routing over sets of nodes that cannot hand off to each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.explain import explain
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.sets import Choice, only_nodes, predict_ttft_s, route_in_sets
from prfaas.scheduler.short_term import route
from prfaas.scheduler.view import View
from prfaas.scheduler.waiting import Hold
from prfaas.types import NodeId
from tests.scheduler.views import (
    LOCAL,
    PLAN,
    REMOTE,
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


@given(requests, views, policies, splits)
def test_the_earliest_first_token_wins(
    request: Request, seen: View, policy: str, split: list[int]
) -> None:
    how = state(policy)
    sets = parts(seen, split)
    found = route_in_sets(request, sets, PLAN, how)
    each = [Choice(route(request, part, PLAN, how), part) for part in sets]
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
    assert found.taken == route(request, seen, PLAN, how)
    ours, theirs = (explain(found, [each], request, PLAN, how) for each in (whole, seen))
    assert ours.alternatives == theirs.alternatives


@pytest.mark.parametrize("policy", ["paper", "adaptive"])
def test_a_set_without_a_prefill_node_serves_alone(policy: str) -> None:
    """Although another set has one."""
    sets = parts(view(dead=frozenset([LOCAL[0]])), [0, 0, 1, 1, 0, 0])
    found = route_in_sets(Request(1, 2000), sets, PLAN, state(policy))
    assert isinstance(found.taken, Route) and found.taken.alone
