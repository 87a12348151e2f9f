from __future__ import annotations

from collections.abc import Iterable

import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.scheduler.board import Board
from prfaas.scheduler.homes.elsewhere import HomeContext, route_from
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.waiting import Hold
from prfaas.types import NodeId
from tests.scheduler.homes.networks import (
    EAST,
    NODES,
    NORTH,
    PLANS,
    ROUND_TRIPS,
    SOUTH,
    WEST,
    board,
    routed,
)

REQUEST = Request(1, 500)
BOTH = pytest.mark.parametrize("policy", ["paper", "adaptive"])


def take(seen: Board, policy: str, *, allowed: bool = True, linked: bool = True) -> Route | Hold:
    rules = SchedulerSection(policy=policy, decode_elsewhere=allowed)  # type: ignore[arg-type]

    def others() -> Iterable[HomeContext]:
        return [routed(seen, WEST, rules)] if linked else []

    return route_from(REQUEST, routed(seen, EAST, rules), others).taken


def lose(seen: Board, role: str = "") -> None:
    """The nodes of `east` with this role; all of them, if none is given."""
    for node in NODES[EAST]:
        if PLANS[EAST].roles[node] == role or not role:
            seen.assign(node, PLANS[EAST].roles[node], usable=False)


def decodes_at_east() -> list[Route]:
    return [
        Route(EAST, node, EAST, node, False, 0, 0, 0, 0.0, (), "test")
        for node, role in PLANS[EAST].roles.items()
        if role == "decode"
    ]


@BOTH
def test_a_request_stays_at_its_home(policy: str) -> None:
    found = take(board(), policy)
    assert isinstance(found, Route)
    assert (found.decode_cluster, found.round_trip_s) == (EAST, 0.0)


@BOTH
def test_without_a_node_at_home_it_decodes_elsewhere(policy: str) -> None:
    seen = board()
    lose(seen)
    found = take(seen, policy)
    assert isinstance(found, Route)
    assert found.decode_cluster == WEST and found.decode in NODES[WEST]
    assert found.round_trip_s == ROUND_TRIPS[EAST, WEST]
    assert "its home cannot serve it" in found.reason


@BOTH
def test_where_its_home_lacks_a_role_the_sooner_of_both_serves_it(policy: str) -> None:
    """A node of its home alone, at once, unless that one is busy."""
    for role in ("prefill", "decode"):
        seen = board()
        lose(seen, role)
        for cluster in (NORTH, SOUTH):
            for number in range(2):
                seen.assign(NodeId(f"{cluster}-{number}"), "prefill", usable=False)
        found = take(seen, policy)
        assert isinstance(found, Route) and found.alone and found.decode_cluster == EAST
        for node in NODES[EAST]:
            if seen.node(node).usable:
                busy = Route(EAST, node, EAST, node, False, 0, 0, 0, 30.0, (), "test")
                seen.record_dispatch(busy, 0.0, 0.0)
        found = take(seen, policy)
        # Policy `adaptive` has a request wait for nodes that are busy.
        assert isinstance(found, Hold) or found.decode_cluster == WEST


@BOTH
def test_it_waits_where_that_is_forbidden_or_no_link_is_known(policy: str) -> None:
    seen = board()
    lose(seen)
    for found in (take(seen, policy, allowed=False), take(seen, policy, linked=False)):
        assert isinstance(found, Hold) and found.cluster is None


@BOTH
def test_taken_slots_at_home_send_it_elsewhere_until_one_is_free(policy: str) -> None:
    seen, jobs = board(), []
    for way in decodes_at_east():
        for _ in range(4):  # slots of a node
            jobs.append(seen.record_dispatch(way, 0.0, -1.0))
            seen.record_handoff(jobs[-1], -1.0)
    found = take(seen, policy)
    assert isinstance(found, Route) and found.decode_cluster == WEST
    seen.record_end(jobs[0])
    found = take(seen, policy)
    assert isinstance(found, Route) and found.decode_cluster == EAST


def test_taken_slots_at_home_are_no_reason_to_queue_at_a_busy_prefill_node_elsewhere() -> None:
    """The requests of the other PD cluster wait for that node."""
    seen = board()
    for way in decodes_at_east():
        for _ in range(4):
            seen.record_handoff(seen.record_dispatch(way, 0.0, -1.0), -1.0)
    idle = take(seen, "paper")
    assert isinstance(idle, Route) and idle.cluster == WEST, "a short prompt prefills there"
    (decode, *_) = (node for node, role in PLANS[WEST].roles.items() if role == "decode")
    for node, role in PLANS[WEST].roles.items():
        if role == "prefill":
            busy = Route(WEST, node, WEST, decode, False, 0, 0, 0, 0.01, (), "test")
            seen.record_dispatch(busy, 0.0, 0.0)
    found = take(seen, "paper")
    assert isinstance(found, Hold) or found.cluster != WEST


def test_idle_prefill_nodes_do_not_draw_it_where_decode_slots_are_taken() -> None:
    """A lost home's requests rather wait for a prefill node where a decode slot is free."""
    rules = SchedulerSection(policy="adaptive")
    lost, full, free = board(), board(), board()
    lose(lost)
    for node, role in PLANS[WEST].roles.items():
        if role == "decode":
            decodes = Route(WEST, node, WEST, node, False, 0, 0, 0, 0.0, (), "test")
            for _ in range(16):  # four per slot
                full.record_handoff(full.record_dispatch(decodes, 0.0, -1.0), -1.0)
    (decode, *_) = (node for node, role in PLANS[WEST].roles.items() if role == "decode")
    sources = [(WEST, node) for node, role in PLANS[WEST].roles.items() if role == "prefill"]
    sources += [(name, NodeId(f"{name}-{k}")) for name in (NORTH, SOUTH) for k in range(2)]
    for cluster, node in sources:  # every prefill node is busy for a while
        busy = Route(cluster, node, WEST, decode, cluster != WEST, 0, 0, 0, 30.0, (), "test")
        free.record_dispatch(busy, 0.0, 0.0)
    idle, roomy = routed(full, WEST, rules), routed(free, WEST, rules)
    home = routed(lost, EAST, rules)
    assert isinstance(route_from(REQUEST, home, lambda: [idle]).taken, Route)
    for others in ([idle, roomy], [roomy, idle]):
        assert isinstance(route_from(REQUEST, home, lambda given=others: given).taken, Hold)


@BOTH
def test_a_longer_prefill_queue_at_home_is_no_reason(policy: str) -> None:
    seen = board()
    for node, role in PLANS[EAST].roles.items():
        if role == "prefill":
            way = Route(EAST, node, EAST, decodes_at_east()[0].decode, False, 0, 0, 0, 30.0, (), "")
            seen.record_dispatch(way, 0.0, 0.0)
    found = take(seen, policy)
    assert isinstance(found, Hold) or found.decode_cluster == EAST
