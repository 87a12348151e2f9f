"""Two gateways elect the one that plans, at real kvds over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from prfaas.contracts.kvd_api import LONGEST_LEASE_S, ClaimPlanning, PlanningLease, SetRole
from prfaas.errors import Unreachable
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.planning.candidacy import RENEW_S
from prfaas.gateway.planning.election import Election
from prfaas.http_client.client import open_client
from prfaas_lab.testing.clock import FakeClock
from tests.kvd.hosts import Host, kvd
from tests.waiting import HANG_S


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def hosts(tmp_path: Path, clock: FakeClock) -> Iterator[list[Host]]:
    """Three kvds that have run for a while."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(kvd(tmp_path, name=f"k{number}", clock=clock))
            for number in range(3)
        ]
        clock.advance(LONGEST_LEASE_S)
        yield found


@asynccontextmanager
async def election(
    instance: str, urls: Sequence[str], clock: FakeClock, unreachable: set[str]
) -> AsyncIterator[Election]:
    async with open_client() as http:

        async def claim(url: str, body: ClaimPlanning) -> PlanningLease:
            if instance in unreachable:
                raise Unreachable(f"{url}: no network")
            return await KvdClient(http, url).claim_planning(body)

        yield Election(instance, lambda: urls, claim, clock, lambda: 0)


async def step_until_one_plans(clock: FakeClock, *elections: Election) -> None:
    for _ in range(20):
        for one in elections:
            await one.step()
        if any(one.plans for one in elections):
            return
        clock.advance(RENEW_S)
    raise AssertionError("no gateway plans")


async def test_one_of_two_gateways_plans_and_the_other_one_follows(
    hosts: list[Host], clock: FakeClock
) -> None:
    urls = [host.url for host in hosts]
    unreachable: set[str] = set()
    async with (
        election("a", urls, clock, unreachable) as a,
        election("b", urls, clock, unreachable) as b,
        open_client() as http,
    ):
        assert not a.plans
        await step_until_one_plans(clock, a)
        await b.step()
        assert a.plans and not b.plans and a.epoch == 1
        assert b.majority_epoch == 1
        for _ in range(10):
            clock.advance(RENEW_S)
            await b.step()
            await a.step()
            assert a.plans and not b.plans
        # Its network is lost: it stops planning by itself, before the other one can.
        unreachable.add("a")
        clock.advance(LONGEST_LEASE_S - 0.01)
        await a.step()
        await b.step()
        assert not a.plans and not b.plans
        await step_until_one_plans(clock, b, a)
        assert b.plans and b.epoch == 2 and not a.plans
        # A role that it decided on before is refused.
        kvds = KvdClient(http, urls[0])
        assert await kvds.set_role(SetRole("prefill", 0, planning_epoch=a.epoch)) is None
        assert await kvds.set_role(SetRole("prefill", 0, planning_epoch=b.epoch)) is not None
        unreachable.clear()
        await a.step()
        assert not a.plans and a.majority_epoch == 2
        await b.give_up()
        assert not b.plans and b.epoch == 2
        await a.step()
        clock.advance(RENEW_S)
        await a.step()
        assert a.plans and a.epoch == 3


async def test_planning_survives_the_end_of_a_kvd_and_not_of_two(
    tmp_path: Path, clock: FakeClock
) -> None:
    with ExitStack() as first, ExitStack() as others:
        urls = [
            stack.enter_context(kvd(tmp_path, name=name, clock=clock)).url
            for stack, name in ((first, "k0"), (others, "k1"), (others, "k2"))
        ]
        clock.advance(LONGEST_LEASE_S)
        async with election("a", urls, clock, set()) as a:
            await step_until_one_plans(clock, a)
            await asyncio.to_thread(first.close)
            for _ in range(10):
                clock.advance(RENEW_S)
                await a.step()
                assert a.plans and a.epoch == 1
            await asyncio.to_thread(others.close)
            clock.advance(LONGEST_LEASE_S)
            await a.step()
            assert not a.plans


async def test_a_kvd_that_does_not_answer_does_not_delay_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its call goes on while the next round begins, and it gets no second one."""
    monkeypatch.setattr("prfaas.gateway.planning.election.CLAIM_S", HANG_S)
    clock, silent = FakeClock(), asyncio.Event()
    asked: list[str] = []

    async def claim(url: str, body: ClaimPlanning) -> PlanningLease:
        asked.append(url)
        if url == "http://c" and silent.is_set():
            await asyncio.Event().wait()
        return PlanningLease("a", body.epoch, body.epoch > 0, body.lease_s)

    urls = ["http://a", "http://b", "http://c"]
    a = Election("a", lambda: urls, claim, clock, lambda: 0)
    await step_until_one_plans(clock, a)
    silent.set()
    asked.clear()
    await a.step()
    assert asked == urls
    asked.clear()
    await a.step()
    assert asked == urls[:2] and a.plans
    asked.clear()
    silent.clear()
    await a.give_up()
    assert asked == urls and not a.plans


async def test_a_call_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prfaas.gateway.planning.election.CLAIM_S", 0.01)

    async def claim(url: str, body: ClaimPlanning) -> PlanningLease:
        await asyncio.Event().wait()
        raise AssertionError

    a = Election("a", lambda: ["http://a"], claim, FakeClock(), lambda: 0)
    async with asyncio.timeout(HANG_S):
        await a.step()
    assert not a.plans


async def test_a_defect_of_a_call_is_not_hidden() -> None:
    async def claim(url: str, body: ClaimPlanning) -> PlanningLease:
        raise ZeroDivisionError

    a = Election("a", lambda: ["http://a"], claim, FakeClock(), lambda: 0)
    with pytest.raises(ZeroDivisionError):
        await a.step()


async def test_without_kvds_no_gateway_plans() -> None:
    async def claim(url: str, body: ClaimPlanning) -> PlanningLease:
        raise AssertionError

    a = Election("a", list, claim, FakeClock(), lambda: 3)
    await a.step()
    await a.give_up()
    assert not a.plans and (a.epoch, a.majority_epoch) == (0, 0)
