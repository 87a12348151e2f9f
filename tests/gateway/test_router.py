from __future__ import annotations

import asyncio

import pytest

from prfaas.config.gateway import GatewaySection, GatewayTimeouts
from prfaas.errors import RequestError
from prfaas.scheduler.waiting import Hold
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import until
from tests.gateway.fleets import (
    LONG,
    SHORT,
    A,
    B,
    C,
    F,
    fleet_and_router,
    place,
    placement,
)


async def test_routes_as_the_scheduler_decides() -> None:
    clock = FakeClock()
    _, router = fleet_and_router(clock)
    assert await place(router, placement(LONG, clock)) == (F, B)
    assert await place(router, placement(SHORT, clock)) == (A, C), "b has one already"


async def test_a_prompt_of_one_token_has_nothing_to_hand_off() -> None:
    clock = FakeClock()
    _, router = fleet_and_router(clock)
    assert await place(router, placement(1, clock)) == (B, B)


async def test_avoiding_a_node_is_a_preference() -> None:
    clock = FakeClock()
    _, router = fleet_and_router(clock)
    assert await place(router, placement(LONG, clock, F)) == (A, B)
    assert await place(router, placement(LONG, clock, B, C)) == (A, A)
    prefill, decode = await place(router, placement(LONG, clock, A, F))
    assert prefill == decode and decode in (B, C), "rather alone than where it has failed"


async def test_a_request_waits_until_a_node_can_decode_it() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    for node in (A, B, C):
        fleet.drain(node)
    wanted = placement(LONG, clock)
    waiting = asyncio.create_task(router.place(wanted, 30.0))
    await until(lambda: len(router.waiting_room) == 1)
    fleet.assign_role(B, "decode")
    fleet.refresh()
    assert (await waiting).route.decode == B
    assert not router.waiting_room
    (wait,) = wanted.waits
    assert wait.reason and not wait.cluster, "why it waited; and no cluster was busy"


async def test_a_wait_says_for_what_and_since_when() -> None:
    """First for a busy node; then every PD node is lost, and no node may take it."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock, policy="adaptive")
    router.why_unserved = lambda home: f"{home} is lost"
    for seed in range(40):  # until every queue is long enough
        if router.try_dispatch(placement(LONG, clock, seed=seed)) is not None:
            break
    wanted = placement(LONG, clock, seed=99)
    waiting = asyncio.create_task(router.place(wanted, 0.05))
    await until(lambda: len(router.waiting_room) == 1)
    clock.advance(3.0)
    for node in (A, B, C):
        fleet.drain(node)
    router.retry_waiting()
    with pytest.raises(RequestError, match=r"within 0 s: pd is lost$"):
        await waiting
    busy, lost = wanted.waits
    assert busy.cluster in ("pd", "far") and busy.at_s == 0.0
    assert (lost.at_s, lost.cluster, lost.reason) == (3.0, "", "pd is lost")


async def test_the_time_of_the_state_on_the_link_is_predicted() -> None:
    clock = FakeClock()
    _, router = fleet_and_router(clock)
    far, near = placement(LONG, clock), placement(SHORT, clock)
    for wanted in (far, near):
        await router.place(wanted, 1.0)
    assert far.booking is not None and near.transfer_s is None and not near.waits
    assert far.transfer_s == far.booking.route.nbytes * 8 / 10e9, "of the configured link"


async def test_a_free_node_goes_to_the_first_waiting_request_before_a_new_one() -> None:
    """The waiting request is placed at once when the new one arrives. No report and no end
    of a prefill has to come first."""
    clock = FakeClock()
    fleet, router = fleet_and_router(
        clock, policy="adaptive", adaptive={"queue_s": 0.0}, alone={"margin_s": 1e3}
    )
    fleet.record_engine_failure(A)  # so that only F prefills
    first = placement(LONG, clock)
    router.waiting_room.put(first, Hold("test", fleet.remotes[0], 0.1, clock.now()))
    clock.advance(10.0)

    new = placement(LONG, clock)
    waiting = asyncio.create_task(router.place(new, 30.0))
    await until(lambda: first.placed.is_set())
    assert first.booking is not None and first.booking.route.prefill == F
    assert new.booking is None and len(router.waiting_room) == 1
    clock.advance(first.booking.route.prefill_s)
    first.booking.prefilled(clock.now())
    first.booking.close(clock.now())
    assert await waiting is new.booking and not router.waiting_room


async def test_waiting_is_bounded() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    for node in (A, B, C):
        fleet.drain(node)
    with pytest.raises(RequestError, match="no node could take the request") as refused:
        await router.place(placement(LONG, clock), 0.0)
    assert refused.value.status == 503 and refused.value.retry_after_s
    assert not router.waiting_room


async def test_a_full_queue_refuses_requests() -> None:
    clock = FakeClock()
    timeouts = GatewayTimeouts(queue_retry_after_s=7.0)
    limits = GatewaySection(max_queued=1, timeouts=timeouts)
    fleet, router = fleet_and_router(clock, limits=limits)
    for node in (A, B, C):
        fleet.drain(node)
    waiting = asyncio.create_task(router.place(placement(LONG, clock), 60.0))
    await until(lambda: len(router.waiting_room) == 1)
    with pytest.raises(RequestError, match="gateway.max_queued = 1") as refused:
        await router.place(placement(LONG, clock), 60.0)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 7.0)
    waiting.cancel()


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(at_once: bool) -> None:
    """Also when it is placed in the moment in which it is cancelled."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    for node in (A, B, C):
        fleet.drain(node)
    before = fleet.board.node(F)
    waiting = asyncio.create_task(router.place(placement(LONG, clock), 30.0))
    await until(lambda: len(router.waiting_room) == 1)
    if at_once:
        fleet.assign_role(B, "decode")
        fleet.refresh()
        assert fleet.board.node(B).active == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and not router.waiting_room
    fleet.board.forget_work(F)
    assert fleet.board.node(F) == before._replace(free_at_s=fleet.board.node(F).free_at_s)
    assert fleet.board.node(B).active == 0


async def test_requests_held_for_a_cluster_that_is_lost_go_to_another_cluster() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock, policy="adaptive", adaptive={"queue_s": 0.0})
    first = placement(LONG, clock)
    router.waiting_room.put(first, Hold("test", fleet.remotes[0], 0.1, clock.now()))
    fleet.record_engine_failure(F)
    assert first.booking is not None and first.booking.route.prefill == A
    assert not router.waiting_room
