from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.deployment import SchedulerSection
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.scheduler.homes.fair_shares import (
    IDLE_S,
    LEAST_WEIGHT,
    LINK_AHEAD_S,
    SharedCluster,
    ShareUses,
    planned_work,
    share_hold,
    time_to_drain_s,
    waits_for_link,
    weights_by_cluster,
)
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import LinkView, NodeView
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId, NodeId
from tests.scheduler.homes.networks import EAST, NETWORK, NORTH, PLANS, SOUTH, WEST

NODE = NodeId("north-0")
ROUTE = Route(NORTH, NODE, EAST, NodeId("east-3"), True, 0, 0, 0, 2.0, (), "long")
REQUEST = Request(1, 500, 3.0)
LINK = (NORTH, EAST)
NOW_S = 100.0


def test_planned_work_is_what_the_planner_gives_each_prfaas_cluster() -> None:
    solved = NetworkPlanner("exact").solve(NETWORK)
    for cluster in (NORTH, SOUTH):
        (prfaas,) = (one for one in solved.prfaas if one.cluster == cluster)
        total = sum(planned_work(plan)[cluster] for plan in PLANS.values())
        assert total == pytest.approx(prfaas.utilisation * prfaas.instances, rel=1e-6)


def test_every_home_has_a_weight_at_every_prfaas_cluster() -> None:
    unused = replace(PLANS[WEST], shares=(0.0, 1.0))
    weights = weights_by_cluster({EAST: PLANS[EAST], WEST: unused}, [NORTH])[NORTH]
    assert weights[EAST] == planned_work(PLANS[EAST])[NORTH]
    assert weights[WEST] == LEAST_WEIGHT * weights[EAST]
    new = ClusterId("new")
    assert weights_by_cluster(PLANS, [new]) == {new: {EAST: 1.0, WEST: 1.0}}


def test_uses_add_up_and_decay() -> None:
    uses = ShareUses(10.0)
    uses.record(NORTH, EAST, 3.0, 0.0)
    uses.record(NORTH, EAST, 1.0, 5.0)
    uses.record(NORTH, WEST, 2.0, 5.0)
    assert uses.used_s(NORTH, EAST, 15.0) == pytest.approx(3 * math.exp(-1.5) + math.exp(-1))
    assert uses.of_homes(NORTH, 15.0)[WEST] == pytest.approx(2 * math.exp(-1))
    assert uses.used_s(SOUTH, EAST, 15.0) == 0.0
    used_s = uses.used_s(NORTH, WEST, 15.0)
    assert uses.used_s(NORTH, WEST, 14.0) == used_s, "an earlier time does not raise a use"


@given(
    st.lists(st.tuples(st.sampled_from([EAST, WEST]), st.floats(0.01, 60.0)), max_size=30),
    st.floats(0.0, 5.0),
)
def test_two_homes_are_not_both_ahead(
    dispatched: list[tuple[ClusterId, float]], stated_s: float
) -> None:
    """A free node that both want goes to one of them."""
    uses = ShareUses()
    for number, (home, used) in enumerate(dispatched):
        uses.record(NORTH, home, used, float(number))
    used_s, weights = uses.of_homes(NORTH, 40.0), {EAST: 3.0, WEST: 1.0}
    node = NodeView(NODE, "prefill", True, 40.0, 0, 0, 0, 0.0)
    shared = SharedCluster(NORTH, weights, used_s, wanting=list(weights))
    both = [
        share_hold(
            ROUTE, REQUEST, home, shared, node, 40.0, stated_s=stated_s, queue_s=0.5, drain_s=0.0
        )
        for home in weights
    ]
    assert None in both


def held(
    *,
    free_at_s: float,
    east_s: float = 30.0,
    west_s: float = 0.0,
    wanting: tuple[ClusterId, ...] = (),
    drain_s: float = 0.0,
) -> Hold | None:
    """The hold of a request of `east`, which has twice the share of `west`."""
    node = NodeView(NODE, "prefill", True, free_at_s, 0, 0, 0, 0.0)
    shared = SharedCluster(NORTH, {EAST: 2.0, WEST: 1.0}, {EAST: east_s, WEST: west_s}, wanting)
    return share_hold(
        ROUTE, REQUEST, EAST, shared, node, NOW_S, stated_s=2.0, queue_s=0.5, drain_s=drain_s
    )


def test_a_home_that_is_ahead_leaves_a_free_node_to_the_home_that_wants_it() -> None:
    found = held(free_at_s=NOW_S, wanting=(WEST,))
    assert found == Hold("west has had less of its share of north", NORTH, 2.0, 3.0)


def test_an_unused_share_may_be_used_by_others() -> None:
    assert held(free_at_s=NOW_S) is None, "no other home wants the node"
    assert held(free_at_s=NOW_S - 2 * IDLE_S, wanting=(WEST,)) is None, "the node is idle"


def test_a_home_within_its_share_is_not_held() -> None:
    had_s = (30.0 - 2 / 3 * 2.0) / 2.0  # its part of its own prefill is allowed
    assert held(free_at_s=NOW_S, west_s=had_s + 0.01, wanting=(WEST,)) is None
    assert held(free_at_s=NOW_S, west_s=had_s - 0.01, wanting=(WEST,)) is not None
    assert held(free_at_s=NOW_S + 9.0, west_s=had_s + 0.01, wanting=(WEST,)) is None


def test_a_home_that_is_ahead_does_not_fill_the_queues_of_nodes() -> None:
    assert held(free_at_s=NOW_S + 0.4) is None
    found = held(free_at_s=NOW_S + 0.6)
    assert found is not None and found.cluster == NORTH


def test_requests_do_not_pass_the_waiting_ones_of_their_home() -> None:
    found = held(free_at_s=NOW_S + 0.6, east_s=0.0, wanting=(EAST,))
    assert found is not None and found.reason == "other requests of east wait for north"
    assert held(free_at_s=NOW_S, east_s=0.0, wanting=(EAST,)) is None


def test_a_home_that_is_ahead_prefills_nothing_that_would_wait_for_its_link() -> None:
    full_s = 2.0 + LINK_AHEAD_S  # the prefill takes 2 s
    assert held(free_at_s=NOW_S, drain_s=full_s) is None
    found = held(free_at_s=NOW_S, drain_s=full_s + 0.1)
    assert found is not None and found.cluster == NORTH
    assert held(free_at_s=NOW_S + 0.4, drain_s=full_s + 0.3) is None, "it begins later"
    idle_s = NOW_S - 2 * IDLE_S
    assert held(free_at_s=idle_s, drain_s=full_s + 0.1) is not None, "an idle node does not help"


def test_nothing_waits_at_the_router_for_a_link_that_has_become_slow() -> None:
    """It would wait until it is refused, and is served late otherwise."""

    def needs_s(bps: float | None) -> float:
        link = LinkView(True, 8e9, 0.01, None, 8e9 / 8 * 99.0)
        links = {} if bps is None else {LINK: LinkState(bps=bps)}
        return time_to_drain_s(LINK, link, ShortTermState(SchedulerSection(), links))

    assert needs_s(None) == pytest.approx(99.0)
    assert needs_s(5e9) > 99.0
    assert needs_s(3e9) == 0.0


def test_a_home_within_its_share_prefills_for_a_full_link() -> None:
    """Else a home whose link is nearly full would lose its share to homes with idle links."""
    assert held(free_at_s=NOW_S, east_s=0.0, drain_s=99.0, wanting=(EAST, WEST)) is None


def test_requests_for_a_full_link_are_retried_when_it_has_carried_more() -> None:
    def waits(
        backlog_s: float, *, up: bool = True, bps: float | None = None, east_s: float = 30.0
    ) -> bool:
        rate = 8e9 if bps is None else bps
        link = LinkView(up, 8e9, 0.01, None, rate / 8 * backlog_s)
        links = {} if bps is None else {LINK: LinkState(bps=bps)}
        state = ShortTermState(SchedulerSection(), links)
        shared = SharedCluster(NORTH, {EAST: 2.0, WEST: 1.0}, {EAST: east_s, WEST: 1.0}, ())
        return waits_for_link(EAST, shared, 2.0, LINK, link, state)

    assert not waits(LINK_AHEAD_S + 1.9)
    assert waits(LINK_AHEAD_S + 2.1)
    assert not waits(99.0, east_s=0.0), "its home is not ahead"
    # These may be no way any more.
    assert not waits(99.0, up=False)
    assert not waits(99.0, bps=3e9)
