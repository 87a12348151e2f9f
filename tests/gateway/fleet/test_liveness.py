from __future__ import annotations

import asyncio

import pytest

from prfaas.config.gateway import DEFAULTS
from prfaas.gateway.fleet.liveness import FellSilent, Liveness
from prfaas.gateway.fleet.member import Contact
from prfaas.lateness import BEAT_S, Lateness, never_late
from prfaas.types import NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import A, B, C, F, fall_silent, fleet_and_router, member_of
from tests.gateway.reports import appear

TIMEOUTS = DEFAULTS.timeouts


async def wait_for(liveness: Liveness, *nodes: NodeId) -> None:
    async with liveness.unless_silent(*nodes):
        await asyncio.Event().wait()


async def test_calls_without_a_first_token_end_when_one_of_their_nodes_is_silent() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    at_b = asyncio.create_task(wait_for(fleet.liveness, B))
    at_both = asyncio.create_task(wait_for(fleet.liveness, F, B))
    at_c = asyncio.create_task(wait_for(fleet.liveness, C))
    await asyncio.sleep(0)
    fleet.liveness.cancel_silent()
    fall_silent(fleet, clock, B)
    assert not fleet.board.node(B).usable and fleet.board.node(C).usable
    fleet.liveness.cancel_silent()
    for call in (at_b, at_both):
        with pytest.raises(FellSilent, match="b has fallen silent") as silent:
            await call
        assert silent.value.node == B
    assert not at_c.done()
    at_c.cancel()
    with pytest.raises(asyncio.CancelledError):
        await at_c
    assert fleet.liveness.awaited() == []
    # A member that answers is used again at once.
    member_of(fleet, B).engine.hear(clock.now())
    member_of(fleet, B).kvd.hear(clock.now())
    assert fleet.liveness.changed_verdicts() == [(member_of(fleet, B), False)]
    fleet.refresh()
    assert fleet.board.node(B).usable and fleet.liveness.fallen_silent == 1


async def test_what_is_raised_in_the_context_is_not_taken_for_silence() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    with pytest.raises(TimeoutError):
        async with fleet.liveness.unless_silent(B), asyncio.timeout(0.0):
            await asyncio.Event().wait()
    async with fleet.liveness.unless_silent(B):
        pass
    assert fleet.liveness.awaited() == []


@pytest.mark.parametrize("part", ["kvd", "engine"])
def test_a_node_is_silent_when_either_of_its_processes_is(part: str) -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    fall_silent(fleet, clock, B)
    member = member_of(fleet, B)
    (member.engine if part == "kvd" else member.kvd).hear(clock.now())
    assert member.is_silent(clock.now()) and not member.is_alive(clock.now())


def test_streams_that_have_begun_end_when_their_engine_has_hung() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    liveness = fleet.liveness
    ended: list[str] = []
    with (
        liveness.cancel_when_hung(B, lambda: ended.append("b")),
        liveness.cancel_when_hung(C, lambda: ended.append("c")),
    ):
        with liveness.cancel_when_hung(B, lambda: ended.append("over")):
            pass
        fall_silent(fleet, clock, B)
        liveness.cancel_silent()
        assert ended == [], "silent, but it has not hung"
        clock.advance(TIMEOUTS.hung_s)
        member_of(fleet, B).engine.hear(clock.now())
        appear(fleet, member_of(fleet, C), "c", clock.now())
        liveness.cancel_silent()
        assert ended == [], "its kvd has hung: a stream needs its engine only"
        member_of(fleet, B).engine.ask(clock.now() + 0.1)
        clock.advance(TIMEOUTS.hung_s + 0.2)
        appear(fleet, member_of(fleet, C), "c", clock.now())
        liveness.cancel_silent()
        liveness.cancel_silent()
        assert ended == ["b"]


async def test_calls_to_a_node_that_is_not_a_member_end() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    call = asyncio.create_task(wait_for(fleet.liveness, NodeId("unknown")))
    await asyncio.sleep(0)
    fleet.liveness.cancel_silent()
    with pytest.raises(FellSilent):
        await call


async def test_when_no_node_answers_calls_wait_for_longer() -> None:
    """They could not continue elsewhere, and the gateway's own network may be the cause."""
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    call = asyncio.create_task(wait_for(fleet.liveness, B))
    await asyncio.sleep(0)
    fall_silent(fleet, clock, A, B, C, F)
    fleet.liveness.cancel_silent()
    await asyncio.sleep(0)
    assert not call.done()
    clock.advance(TIMEOUTS.hung_s)
    fleet.liveness.cancel_silent()
    with pytest.raises(FellSilent):
        await call


async def test_calls_at_an_old_address_end_though_the_name_has_moved() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    old = member_of(fleet, B)
    call = asyncio.create_task(wait_for(fleet.liveness, B))
    await asyncio.sleep(0)
    fall_silent(fleet, clock, B)
    back = fleet.register("http://new:2", old.cluster)
    assert back is not None
    appear(fleet, back, "b", clock.now())
    assert member_of(fleet, B) is back
    fleet.liveness.cancel_silent()
    with pytest.raises(FellSilent):
        await call


def test_a_pause_of_the_gateway_is_not_the_silence_of_its_nodes() -> None:
    clock = FakeClock()
    lateness = Lateness(clock.now())

    def run(seconds: float) -> None:
        """The gateway runs: its heartbeat comes in time."""
        for _ in range(round(seconds / BEAT_S)):
            clock.advance(BEAT_S)
            lateness.beat(clock.now())

    fleet, _ = fleet_and_router(clock, late_since=lambda s: lateness.since(s, clock.now()))
    ended: list[str] = []
    with fleet.liveness.cancel_when_hung(B, lambda: ended.append("b")):
        run(1.0)
        for member in fleet.members:
            member.kvd.ask(clock.now())
            member.engine.ask(clock.now())
        run(0.5)
        clock.advance(60.0)  # stopped, or one callback took as long
        assert fleet.liveness.changed_verdicts() == []
        fleet.refresh()
        fleet.liveness.cancel_silent()
        assert not ended and fleet.board.node(B).usable
        run(TIMEOUTS.silent_s)
        assert fleet.liveness.changed_verdicts(), "silent since the pause"
        fleet.refresh()
        assert not ended and not fleet.board.node(B).usable
        run(TIMEOUTS.hung_s)
        fleet.liveness.cancel_silent()
        assert ended == ["b"]


# One process --------------------------------------------------------------------------------------


def contact() -> Contact:
    return Contact(TIMEOUTS, never_late)


def test_a_process_is_silent_only_after_a_question() -> None:
    subject = contact()
    assert not subject.is_known
    subject.hear(10.0)
    subject.ask(10.9)
    subject.ask(11.5)
    assert not subject.is_silent(10.9 + TIMEOUTS.silent_s)
    assert subject.is_silent(11.0 + TIMEOUTS.silent_s), "the first question counts"
    subject.hear(11.0)  # bytes of any response
    assert subject.silence_s(11.1) == 0.0
    subject.ask(11.2)
    assert subject.silence_s(11.7) == pytest.approx(0.5)


def test_a_process_whose_polls_have_stopped_is_silent() -> None:
    subject = contact()
    subject.hear(10.0)
    due_s = 10.0 + TIMEOUTS.node_poll_s
    assert not subject.is_silent(due_s + TIMEOUTS.silent_s)
    assert subject.is_silent(due_s + TIMEOUTS.silent_s + 0.1)


def test_a_process_whose_answers_are_late_gets_more_time_for_a_while() -> None:
    subject = contact()
    subject.hear(10.0)
    subject.ask(10.5)
    subject.hear(11.5)  # 1 s late, as on a busy machine
    subject.ask(12.0)
    assert not subject.is_silent(12.0 + 2 * TIMEOUTS.silent_s)
    assert subject.is_silent(12.1 + 2 * TIMEOUTS.silent_s), "three times as late"
    for second in range(12, 120):
        subject.hear(second + 0.5)
        subject.ask(second + 1.0)
    assert subject.is_silent(120.1 + TIMEOUTS.silent_s), "its late answer is long ago"


def test_the_time_that_a_late_process_gets_is_bounded() -> None:
    subject = contact()
    subject.hear(10.0)
    subject.ask(10.5)
    subject.hear(10.5 + 0.9 * TIMEOUTS.unresponsive_s)
    subject.ask(15.0)
    assert not subject.is_silent(15.0 + TIMEOUTS.unresponsive_s)
    assert subject.is_silent(15.1 + TIMEOUTS.unresponsive_s)


def test_a_process_that_was_stopped_gets_no_more_time_afterwards() -> None:
    subject = contact()
    subject.hear(10.0)
    subject.ask(10.5)
    subject.hear(25.0)
    subject.ask(26.0)
    assert subject.is_silent(26.1 + TIMEOUTS.silent_s)
