from __future__ import annotations

from prfaas.gateway.fleet.membership import HUNG_AFTER_S
from prfaas.testing.clock import FakeClock
from prfaas.types import NodeId
from tests.gateway.fleets import B, C, fleet_and_router, member_of
from tests.gateway.reports import IDLE, appear, load


def test_calls_that_wait_for_a_silent_node_are_cancelled_once() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    liveness = fleet.liveness
    cancelled: list[str] = []
    with (
        liveness.cancel_when_silent(B, lambda: cancelled.append("b"), begun=False),
        liveness.cancel_when_silent(B, lambda: cancelled.append("b streams"), begun=True),
        liveness.cancel_when_silent(C, lambda: cancelled.append("c"), begun=False),
    ):
        with liveness.cancel_when_silent(B, lambda: cancelled.append("ended"), begun=False):
            pass
        clock.advance(HUNG_AFTER_S)
        fleet.update()
        assert cancelled == [] and not liveness.has_hung(B)
        clock.advance(1.0)
        appear(fleet, member_of(fleet, C), "c", clock.now())
        # Its kvd is silent, its engine is not: an answer that streams needs the engine only.
        load(fleet, member_of(fleet, B), IDLE, clock.now())
        fleet.update()
        fleet.update()
        assert cancelled == ["b"] and liveness.has_hung(B) and not liveness.has_hung(C)
        clock.advance(HUNG_AFTER_S + 1.0)
        appear(fleet, member_of(fleet, C), "c", clock.now())
        fleet.update()
        assert cancelled == ["b", "b streams"]


def test_a_node_that_is_not_a_member_has_hung() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    assert fleet.liveness.has_hung(NodeId("unknown"))
