"""What other gateways have at the nodes, as this gateway's decisions see it."""

from __future__ import annotations

from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.gateway_work import NO_WORK, OthersWork
from prfaas.scheduler.request import Route
from prfaas.types import NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import PD, A, B, fleet_and_router, member_of
from tests.gateway.reports import load


def test_requests_of_others_count_before_and_after_their_kv_arrives() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    told: dict[NodeId, OthersWork] = {}
    fleet.work.share_with(lambda node: told.get(node, NO_WORK))

    def seen() -> tuple[int, float]:
        """Requests that decode or will decode at `b`, and seconds until `a` is free."""
        return fleet.board.node(B).active, max(0.0, fleet.board.node(A).free_at_s - clock.now())

    assert seen() == (0, 0.0)
    told |= {B: OthersWork(0, 0.0, 3), A: OthersWork(1, 5.0, 0)}
    fleet.work.record_others()
    assert seen() == (3, 5.0), "their KV is still to arrive"
    clock.advance(1.0)
    load(fleet, member_of(fleet, B), Load(running=2, waiting=0), clock.now())
    assert seen()[0] == 3, "two of them decode now"
    load(fleet, member_of(fleet, B), Load(running=5, waiting=0), clock.now())
    fleet.work.record_others()
    assert seen()[0] == 5, "two are of nobody who tells"
    told.clear()
    fleet.work.record_others()
    assert seen()[0] == 5, "as last polled"
    clock.advance(1.0)
    load(fleet, member_of(fleet, B), Load(running=0, waiting=0), clock.now())
    assert seen()[0] == 0


def test_requests_of_which_no_gateway_tells_count_with_the_average() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    for name in (A, B):
        way = Route(PD, A, PD, B, False, 0, 10, 0, 4.0, (), "test")
        booking = fleet.book(way, 10, lambda: None)
        assert fleet.work.prefills_at(A) == 1
        if name == A:
            booking.close(clock.now())
            assert fleet.board.node(A).free_at_s == clock.now(), "it was given up"
    load(fleet, member_of(fleet, A), Load(running=1, waiting=2), clock.now())
    assert fleet.board.node(A).free_at_s == clock.now() + 4.0 + 2 * 4.0
    booking.prefilled(clock.now())
    assert fleet.board.node(A).free_at_s == clock.now() + 2 * 4.0, "its own is seen to have ended"
    assert fleet.work.is_busy(A) is False


def test_prefills_that_another_gateway_has_at_a_decode_node_count() -> None:
    """It serves requests alone there."""
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    fleet.work.share_with(lambda node: OthersWork(1, 3.0, 1) if node == B else NO_WORK)
    load(fleet, member_of(fleet, B), Load(running=1, waiting=0), clock.now())
    assert fleet.board.node(B).free_at_s == clock.now() + 3.0
    assert fleet.board.node(B).active == 1
