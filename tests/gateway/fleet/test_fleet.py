"""What the fleet records changes which nodes the router uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prfaas.errors import ConnectionLost
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import FAR
from tests.gateway.fleets import (
    LONG,
    PD,
    SHORT,
    A,
    B,
    C,
    F,
    fleet_and_router,
    member_of,
    place,
    placement,
    step,
)
from tests.gateway.reports import IDLE, NODE_CARD, appear, load, report


@pytest.mark.parametrize("record", [Fleet.record_engine_failure, Fleet.record_kvd_failure])
async def test_a_node_that_failed_is_not_used_until_it_answers(
    record: Callable[[Fleet, NodeId], None],
) -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    clock.advance(0.1)
    record(fleet, F)
    record(fleet, NodeId("unknown"))
    assert (await place(router, placement(LONG, clock)))[0] == A
    clock.advance(0.1)
    appear(fleet, member_of(fleet, F), "f", clock.now())
    assert (await place(router, placement(LONG, clock)))[0] == F


async def test_a_silent_node_is_not_used() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    clock.advance(100.0)
    for member in fleet.members:
        if member.node != F:
            appear(fleet, member, str(member.node), clock.now())
    step(fleet, router)
    assert fleet.members.usable_nodes(fleet.remotes[0], clock.now()) == []
    assert (await place(router, placement(LONG, clock)))[0] == A


async def test_a_draining_engine_gets_no_new_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    far = member_of(fleet, F)
    for _ in range(2):
        fleet.record_load(far, IDLE, leaving=True, asked_s=clock.now(), own=0)
    assert (await place(router, placement(LONG, clock)))[0] == A
    assert F in [pool.node for pool in fleet.pools()], "its prefixes can still be copied"
    assert caplog.text.count("is draining") == 1


async def test_an_engine_without_a_card_is_not_used() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    far = member_of(fleet, F)
    fleet.record_problem(far, "engine", ConnectionLost("refused"))
    fleet.refresh()
    assert (await place(router, placement(LONG, clock)))[0] == A
    fleet.record_card(far, NODE_CARD)
    fleet.refresh()
    assert (await place(router, placement(LONG, clock)))[0] == F


def test_roles_take_effect_with_the_next_refresh_and_draining_at_once() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    changes: list[str] = []
    fleet.call_on_change(lambda: changes.append("changed"))
    fleet.changed.clear()
    fleet.drain(A)
    assert fleet.roles.is_draining(A) and not fleet.board.node(A).usable
    assert changes == ["changed"] and fleet.changed.is_set()
    fleet.assign_role(A, "decode")
    fleet.assign_role(B, "prefill")
    assert fleet.board.node(B).role == "decode" and changes == ["changed"]
    fleet.refresh()
    assert (fleet.board.node(A).role, fleet.board.node(B).role) == ("decode", "prefill")
    assert fleet.board.node(A).usable and not fleet.roles.is_draining(A)
    assert changes == ["changed"] * 2, "one call for both"
    fleet.refresh()
    assert changes == ["changed"] * 2, "nothing has changed"


async def test_a_queue_is_estimated_although_nodes_only_count_requests() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    far = member_of(fleet, F)
    booking = await router.place(placement(LONG, clock), 1.0)
    work_s = booking.route.prefill_s
    assert fleet.work.prefills_at(far.node) == 1
    clock.advance(work_s / 2)
    load(fleet, far, Load(1, 0), clock.now(), own=1)
    assert fleet.board.node(F).free_at_s == pytest.approx(work_s)
    assert fleet.prefill_waits_s() == {
        A: 0.0,
        B: None,
        C: None,
        F: pytest.approx(work_s / 2),
    }
    clock.advance(work_s / 2)
    booking.prefilled(clock.now())
    load(fleet, far, Load(0, 0), clock.now())
    assert fleet.board.node(F).free_at_s == pytest.approx(clock.now())
    assert fleet.work.prefills_at(far.node) == 0


def test_whether_another_node_decodes() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    assert fleet.has_free_decode_node(PD, {B}) and not fleet.has_free_decode_node(PD, {B, C})
    fleet.drain(C)
    assert not fleet.has_free_decode_node(PD, {B})


async def test_a_restarted_kvd_has_lost_its_work() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    await router.place(placement(LONG, clock), 1.0)
    assert fleet.board.node(F).free_at_s > clock.now()
    fleet.record_report(member_of(fleet, F), report("f", instance="second"))
    assert not fleet.board.node(F).free_at_s > clock.now()


async def test_a_removed_node_leaves_the_board_after_its_last_booking() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    booking = await router.place(placement(LONG, clock), 1.0)
    fleet.remove(member_of(fleet, F))
    assert booking.route.prefill == F and not fleet.board.node(F).usable
    assert (await place(router, placement(LONG, clock)))[0] == A
    booking.close(clock.now())
    step(fleet, router)
    assert F not in fleet.board and len(fleet.members) == 3


async def test_a_kvd_that_restarts_under_another_name_is_another_node() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    fleet.record_report(member_of(fleet, F), report("g", instance="second"))
    assert F not in fleet.board and fleet.members.named(F) is None
    assert (await place(router, placement(LONG, clock)))[0] == "g"


async def test_a_registered_kvd_is_a_node_once_it_reports() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    new = fleet.register("http://n:2", ClusterId(FAR))
    assert new is not None and fleet.register("http://n:2", ClusterId(FAR)) is None
    appear(fleet, new, "n", clock.now())
    fleet.record_engine_failure(F)
    clock.advance(0.1)
    assert (await place(router, placement(LONG, clock)))[0] == "n"


async def test_the_report_of_a_second_kvd_with_the_same_name_is_ignored() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    new = fleet.register("http://n:2", ClusterId(FAR))
    assert new is not None
    fleet.record_report(new, report("a"))
    assert new.report is None and member_of(fleet, A) is not new
    assert await place(router, placement(SHORT, clock)) == (A, B)
