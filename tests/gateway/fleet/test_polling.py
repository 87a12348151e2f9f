"""Polls of one member whose kvd and engine are loopback HTTP servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import MonotonicClock
from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.openai_fields import known_fields
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.liveness import FellSilent
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.fleet.polling import Poller
from prfaas.http_client.client import open_client
from prfaas.types import ClusterId, HashEvent, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import FAR, prompt, until
from tests.gateway.fleets import fleet_and_router, with_timeouts
from tests.gateway.peers import Peer, peer
from tests.gateway.reports import ENDPOINTS, NATIVE_BLOCK, report
from tests.waiting import PATIENCE_S

TIMEOUTS = DEFAULTS.timeouts

N = NodeId("n")
STATS, EVENTS, ROLE = "GET /v1/stats", "GET /v1/events", "GET /v1/role"
MODELS, METRICS, HEALTH = "GET /v1/models", "GET /metrics", "GET /health"
SERVES = {endpoint: sorted(known_fields(endpoint)) for endpoint in ENDPOINTS}
CARD = {"data": [{"id": "m", "max_model_len": 4096, "prfaas": {"serves": SERVES}}]}
LOAD = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
PROMPT = PromptHashes(prompt(640))


@dataclass(slots=True)
class Case:
    fleet: Fleet
    poller: Poller
    member: Member
    kvd: Peer
    engine: Peer

    @property
    def is_usable(self) -> bool:
        return N in self.fleet.board and self.fleet.board.node(N).usable

    def cached_tokens(self) -> int:
        return self.fleet.manager.match(PROMPT).node_tokens(N)


@asynccontextmanager
async def polled(every_s: float = 0.01) -> AsyncIterator[Case]:
    """A member that has just registered, and answers nothing yet."""
    clock = MonotonicClock()
    fleet, _ = fleet_and_router(
        clock, limits=with_timeouts(kvd_poll_s=every_s, node_poll_s=every_s)
    )
    async with peer() as kvd, peer() as engine, open_client() as http:
        async with asyncio.TaskGroup() as tasks:
            poller = Poller(fleet, http, clock, tasks)
            member = fleet.register(kvd.url, ClusterId(FAR))
            assert member is not None
            member.url = engine.url
            poller.start(member)
            yield Case(fleet, poller, member, kvd, engine)
            poller.stop()


async def answer(one: Case) -> None:
    await one.kvd.script(STATS, report(N))
    await one.engine.script(MODELS, CARD)
    await one.engine.script(METRICS, LOAD)
    await one.engine.script(HEALTH, {})


def page(next_seq: int, *events: HashEvent, instance: str = "first", **more: Any) -> dict[str, Any]:
    return {
        "node": N,
        "instance": instance,
        "next_seq": next_seq,
        "events": list(events),
        **more,
    }


def stored(seq: int, group: str, blocks: int) -> HashEvent:
    hashes = PROMPT.at(64)[:blocks]
    return HashEvent(seq, N, group, 64, tuple(hashes if group == "full" else hashes[-1:]), "stored")


async def test_a_member_is_used_once_kvd_and_engine_answer() -> None:
    async with polled() as one:
        await one.kvd.script(STATS, report(N))
        await until(lambda: one.member.report is not None)
        assert not one.is_usable
        await answer(one)
        await until(lambda: one.is_usable)
        assert one.member.card is not None and one.member.card.ours
        assert one.member.load == Load(running=2, waiting=1)
        assert len(one.engine.bodies[MODELS]) == 1, "the card is asked for once"


async def test_an_engine_that_fails_loses_its_card_and_is_asked_for_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with polled() as one:
        await answer(one)
        await until(lambda: one.is_usable)
        await one.engine.script(METRICS, "broken", 500)
        await until(lambda: one.member.card is None)
        await one.engine.script(MODELS, {"data": [{"id": "other"}]})
        # One request may have been answered before; the one after it has the new card.
        await one.engine.requested(MODELS, times=len(one.engine.bodies[MODELS]) + 2)
        await one.engine.script(METRICS, LOAD)
        await until(lambda: one.member.card is not None and one.member.card.model == "other")
        assert caplog.text.count(f"the engine of {one.kvd.url} does not answer") == 1


async def test_a_draining_engine_is_not_used() -> None:
    async with polled() as one:
        await answer(one)
        await until(lambda: one.is_usable)
        await one.engine.script(HEALTH, {"error": {"code": "draining", "message": "bye"}}, 503)
        await until(lambda: not one.is_usable)
        assert one.member.leaving and one.member.card is not None


async def test_cache_events_are_applied_after_a_snapshot() -> None:
    async with polled() as one:
        await answer(one)
        held = {"full": PROMPT.at(64)[:2], "state": PROMPT.at(64)[1:2]}
        await one.kvd.script(EVENTS, page(7, snapshot=held))
        await until(lambda: one.cached_tokens() == 2 * 64)
        await one.kvd.script(EVENTS, page(9, stored(7, "full", 5), stored(8, "state", 5)))
        await until(lambda: one.cached_tokens() == 5 * 64)


async def test_after_a_restart_of_the_kvd_a_snapshot_replaces_everything() -> None:
    async with polled() as one:
        await answer(one)
        held = {"full": PROMPT.at(64)[:2], "state": PROMPT.at(64)[1:2]}
        await one.kvd.script(EVENTS, page(7, snapshot=held))
        await until(lambda: one.cached_tokens() == 2 * 64)
        await one.kvd.script(EVENTS, page(3, stored(2, "full", 5), instance="second"))
        asked = len(one.kvd.bodies[EVENTS])
        await one.kvd.requested(EVENTS, times=asked + 2)
        assert one.cached_tokens() == 2 * 64, "events of another process need a snapshot first"
        await one.kvd.script(EVENTS, page(3, instance="second", snapshot={"full": [], "state": []}))
        await until(lambda: one.cached_tokens() == 0)


async def test_a_second_pool_is_followed_under_its_own_name() -> None:
    """With its own groups and block size; it is dropped when the pool is gone."""
    name = NodeId("n/native")
    chain = PROMPT.at(NATIVE_BLOCK)[:7]
    async with polled() as one:
        await answer(one)
        await until(lambda: one.is_usable)
        await one.kvd.script(STATS, report(N, native="vllm-a"))
        held = {"blocks": chain, "slots": chain[-1:]}
        await one.kvd.script(EVENTS, {**page(4, snapshot=held), "node": name})
        await until(lambda: one.fleet.manager.match(PROMPT).node_tokens(name) == 7 * NATIVE_BLOCK)
        asked = {query["node"] for query in one.kvd.queries[EVENTS]}
        assert asked == {N, name}
        assert one.fleet.prefixes.by_node(one.fleet.manager.match(PROMPT))[N].tokens == 112
        await one.kvd.script(STATS, report(N))
        await until(lambda: not one.fleet.manager.match(PROMPT).nodes)


async def test_a_member_that_has_expired_is_not_polled_any_more() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    async with open_client() as http, asyncio.TaskGroup() as tasks:
        poller = Poller(fleet, http, clock, tasks)
        member = fleet.register("http://127.0.0.1:1", ClusterId(FAR))
        assert member is not None
        poller.start(member)
        poller.drop_expired()
        assert member in list(fleet.members)
        clock.advance(TIMEOUTS.forget_s + 1.0)
        poller.drop_expired()
        assert member not in list(fleet.members)
        # The task group ends because the member's task is cancelled.


async def test_a_member_that_registers_during_the_shutdown_is_not_polled() -> None:
    """Its coroutine is closed: Python would warn of one that was never awaited."""
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    async with open_client() as http:
        async with asyncio.TaskGroup() as tasks:
            poller = Poller(fleet, http, clock, tasks)
        poller.start(next(iter(fleet.members)))
        poller.stop()


async def test_a_kvd_that_moves_to_another_port_is_used_there_at_once() -> None:
    async with polled() as one, peer() as new:
        name = NodeId("moved")
        async with peer() as old:
            await old.script(STATS, report(name))
            before = one.fleet.register(old.url, ClusterId(FAR))
            assert before is not None
            before.url = one.engine.url
            one.poller.start(before)
            await until(lambda: one.fleet.members.named(name) is before)
            await new.script(STATS, report(name, instance="second"))
            after = one.fleet.register(new.url, ClusterId(FAR))
            assert after is not None
            after.url = one.engine.url
            one.poller.start(after)
            await until(lambda: after.has_duplicate_name)
            assert one.fleet.members.named(name) is before
        # The old port refuses connections now.
        await answer(one)
        await until(lambda: one.fleet.members.named(name) is after)
        await until(lambda: one.fleet.board.node(name).usable)


@pytest.mark.parametrize("silent", ["kvd", "engine"])
async def test_a_process_that_calls_wait_for_is_asked_and_ends_them_when_it_is_silent(
    silent: str,
) -> None:
    """Its connections stay open. Other nodes answer: they are heard again and again."""
    async with polled(every_s=1.0) as one:
        await answer(one)
        await one.kvd.script(ROLE, {"role": "both", "epoch": 0})
        await until(lambda: one.is_usable)
        watching = asyncio.create_task(one.poller.watch())
        others = [member for member in one.fleet.members if member is not one.member]

        async def wait() -> None:
            async with one.fleet.liveness.unless_silent(N):
                while True:
                    for part in (part for m in others for part in (m.kvd, m.engine)):
                        part.hear(time.monotonic())
                    await asyncio.sleep(0.01)

        waiting = asyncio.create_task(wait())
        await one.kvd.requested(ROLE)  # only probes ask for it
        for path in (STATS, ROLE) if silent == "kvd" else (METRICS, HEALTH):
            (one.kvd if silent == "kvd" else one.engine).silence(path)
        with pytest.raises(FellSilent, match=N):
            async with asyncio.timeout(PATIENCE_S):
                await waiting
        assert not one.is_usable
        await answer(one)
        await one.kvd.script(ROLE, {"role": "both", "epoch": 0})
        await until(lambda: one.is_usable)
        watching.cancel()
        await asyncio.wait([watching])
