"""Copies: shared by those who want the same, and never more than a miss when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from prfaas.config.address import Address, parse_address
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.planning.prefix_copies import REST_S, PrefixCopies, PrefixCopy
from prfaas.http_client.client import open_client
from prfaas.types import BlockHash, NodeId
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import (
    FAR,
    HOME,
    THRESHOLD,
    answered,
    deployment,
    gateway_request,
    is_clean,
    moved,
    node,
    prompt,
    serving,
    until,
    until_it_would_resume,
)
from tests.gateway.conftest import Hosts
from tests.gateway.fleets import A, B, C, fleet_and_router, member_of
from tests.gateway.reports import add_native, native_compat, report

BLOCK = 64


@pytest.fixture
def relay(emulated: Hosts) -> Iterator[Relay]:
    """In front of the kvd far away."""
    data = parse_address(emulated.far[0].stats(check=False)["data_address"], "data_address")
    with closing(Relay(Address("127.0.0.1", 0), data, Conditions()).start()) as started:
        yield started


async def test_a_copy_that_does_not_come_is_computed(emulated: Hosts, relay: Relay) -> None:
    """The third turn's prefill is far away; the second one's state does not get there in time."""
    (far,) = emulated.far
    made = deployment(
        [node(host) for host in emulated.home],
        [{**node(far), "via": str(relay.address)}],
        links=[{"from": HOME, "to": FAR, "gbps": 1e5}],
    )
    first = prompt(2 * THRESHOLD, 30)
    second = [*first, *prompt(THRESHOLD - BLOCK, 31)]
    third = [*second, *prompt(2 * THRESHOLD, 32)]
    cached = [0, len(first) // BLOCK * BLOCK, len(second) // BLOCK * BLOCK]

    async with serving(made) as backend:
        for ids, tokens in zip((first, second, third), cached, strict=True):
            asked = gateway_request(ids, conversation=True)
            await until_it_would_resume(backend, asked, tokens)
            if ids is third:
                relay.outage()
            found = await answered(backend, asked)
            alone = await asyncio.to_thread(
                emulated.home[0].complete, ids, max_tokens=4, cache_salt="alone"
            )
            assert found.tokens == alone["choices"][0]["token_ids"]
            assert found.trace.attempts == 1
        assert found.trace.cluster == FAR and moved(backend, "route") == (1, 1)
        assert backend.state()["moves"]["under_way"] == []
        await until(lambda: found.trace.cached_tokens == cached[1])
        relay.restore()
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_one_for_all_and_a_rest_after_a_failure() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    for member in fleet.members:
        member.kvd_url = "http://127.0.0.1:1"  # no process listens
    copy = PrefixCopy("route", B, A, (BlockHash(b"x"),), BLOCK)

    async with open_client() as http, BackgroundCalls(0.0) as background_calls:
        copies = PrefixCopies(fleet, http, background_calls, clock)
        tally = copies.tallies["route"]

        async def tried(which: PrefixCopy) -> bool:
            task = copies.start(which, 5.0)
            if task is None:
                return False
            assert copies.start(which, 5.0) is task and copies.under_way == [which]
            await task
            return True

        assert await tried(copy) and (tally.made, tally.failed) == (0, 1)
        assert not await tried(copy), "no copy between these two for a while"
        assert await tried(copy._replace(source=C)), "but between others"
        assert not await tried(copy._replace(source=NodeId("unknown")))
        assert not await tried(copy._replace(hashes=()))
        native = copy._replace(compat=native_compat())
        clock.advance(REST_S)
        assert not await tried(native), "neither has such a pool"
        add_native(fleet, A)
        assert not await tried(native), "the source has no such pool"
        add_native(fleet, A, B)
        first, second = copies.start(copy, 5.0), copies.start(native, 5.0)
        assert first is not None and second is not None and first is not second
        await asyncio.wait([first, second])
        assert tally.failed == 4
        fleet.record_report(member_of(fleet, C), report("c", instance="second", revision="2"))
        clock.advance(REST_S)
        assert not await tried(copy._replace(source=C)), "another KV format"
        assert await tried(copy) and (tally.made, tally.failed) == (0, 5)
        assert copies.under_way == []
