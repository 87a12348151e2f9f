"""Sets of members with equal KV formats serve side by side: what a rolling upgrade needs."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kvd_api import KvdReport
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.router import Router
from prfaas.testing.clock import FakeClock
from prfaas.types import NodeId
from tests.gateway.fleets import (
    LONG,
    SHORT,
    A,
    B,
    C,
    F,
    fleet_and_router,
    member_of,
    place,
    placement,
)
from tests.gateway.reports import IDLE, load, report

TIMEOUTS = DEFAULTS.timeouts


def restart(fleet: Fleet, node: NodeId, revision: str, clock: FakeClock, **more: object) -> None:
    """The node has a new process, whose engine has this revision."""
    clock.advance(0.01)
    instance = f"{node} {revision} {clock.now()}"
    upgraded = report(str(node), instance=instance, revision=revision)
    member = member_of(fleet, node)
    fleet.record_report(member, changed(upgraded, **more) if more else upgraded)
    appear_engine(fleet, member, clock)


def changed(found: KvdReport, **more: object) -> KvdReport:
    """The report with another format."""
    replace = msgspec.structs.replace
    pool = found.pool
    assert pool is not None
    size = more.get("block_tokens", pool.block_tokens)
    pool = replace(pool, compat=replace(pool.compat, **more), block_tokens=size)
    return replace(found, pool=pool)


def appear_engine(fleet: Fleet, member: Member, clock: FakeClock) -> None:
    from prfaas.gateway.client.node_client import Card

    fleet.record_card(member, Card("m", None, ours=True))
    load(fleet, member, IDLE, clock.now())


def used(fleet: Fleet) -> list[str]:
    fleet.refresh()
    return [str(m.node) for m in fleet.members if m.node and fleet.board.node(m.node).usable]


def leave(fleet: Fleet, node: NodeId, clock: FakeClock) -> None:
    """The node's engine answers that it drains."""
    fleet.record_load(member_of(fleet, node), IDLE, leaving=True, asked_s=clock.now(), own=0)


async def routes(router: Router, clock: FakeClock, count: int = 40) -> list[tuple[str, str]]:
    """Where so many requests go, short and long ones, all of them under way at the same time."""
    return [await place(router, placement(LONG if i % 2 else SHORT, clock)) for i in range(count)]


@pytest.mark.xfail(strict=True, reason="nodes with another format than the one in use are not used")
def test_an_upgraded_node_serves_beside_the_others() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    for node in (B, F, A, C):
        restart(fleet, node, "2", clock)
        if node != F:
            assert set(used(fleet)) >= {A, B, C}, f"after {node}"
    assert used(fleet) == [A, B, C, F]


@pytest.mark.xfail(strict=True, reason="nodes with another format than the one in use are not used")
async def test_hand_offs_stay_within_a_set_and_both_sets_serve() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    restart(fleet, C, "2", clock)
    taken = await routes(router, clock)
    for prefill, decode in taken:
        assert (prefill == C) == (decode == C), (prefill, decode)
    assert {decode for _, decode in taken} == {B, C}


@pytest.mark.xfail(strict=True, reason="a request waits while the only prefill node restarts")
async def test_a_decode_node_prefills_while_the_only_prefill_node_restarts() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock, policy="local")
    fleet.record_engine_failure(F)
    clock.advance(0.1)
    leave(fleet, A, clock)
    waiting = asyncio.create_task(router.place(placement(LONG, clock), 1.0))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    waiting.cancel()
    assert done and waiting.result().route.prefill == waiting.result().route.decode
