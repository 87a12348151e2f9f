from __future__ import annotations

from prfaas.config.gateway import DEFAULTS
from prfaas.lateness import BEAT_S, Lateness
from prfaas.testing.clock import FakeClock
from prfaas.types import NodeId
from tests.gateway.fleets import B, C, fleet_and_router, member_of
from tests.gateway.reports import IDLE, appear, load

TIMEOUTS = DEFAULTS.timeouts


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
        clock.advance(TIMEOUTS.hung_s)
        fleet.update()
        assert cancelled == [] and not liveness.has_hung(B)
        clock.advance(1.0)
        appear(fleet, member_of(fleet, C), "c", clock.now())
        # Its kvd is silent, its engine is not: an answer that streams needs the engine only.
        load(fleet, member_of(fleet, B), IDLE, clock.now())
        fleet.update()
        fleet.update()
        assert cancelled == ["b"] and liveness.has_hung(B) and not liveness.has_hung(C)
        clock.advance(TIMEOUTS.hung_s + 1.0)
        appear(fleet, member_of(fleet, C), "c", clock.now())
        fleet.update()
        assert cancelled == ["b", "b streams"]


def test_a_node_that_is_not_a_member_has_hung() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    assert fleet.liveness.has_hung(NodeId("unknown"))


def test_a_pause_of_the_gateway_is_not_the_silence_of_its_nodes() -> None:
    clock = FakeClock()
    lateness = Lateness(clock.now())

    def run(seconds: float) -> None:
        """The gateway runs: its heartbeat comes in time."""
        for _ in range(round(seconds / BEAT_S)):
            clock.advance(BEAT_S)
            lateness.beat(clock.now())

    fleet, _ = fleet_and_router(clock, late_since=lambda s: lateness.since(s, clock.now()))
    cancelled: list[str] = []
    with fleet.liveness.cancel_when_silent(B, lambda: cancelled.append("b"), begun=True):
        run(1.0)
        clock.advance(60.0)  # stopped, or one callback took as long
        fleet.update()
        assert not fleet.liveness.has_hung(B) and fleet.board.node(B).usable
        run(TIMEOUTS.unresponsive_s)
        fleet.update()
        assert not cancelled and not fleet.board.node(B).usable, "it is silent since the pause"
        run(TIMEOUTS.hung_s)
        fleet.update()
        assert cancelled == ["b"]
