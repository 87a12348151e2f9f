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
from prfaas.testing.clock import FakeClock
from prfaas.types import BlockHash, NodeId
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.gateway.backs import (
    FAR,
    HOME,
    THRESHOLD,
    answered,
    ask,
    deployment,
    is_clean,
    moved,
    node,
    prompt,
    serving,
    until,
    until_it_would_resume,
)
from tests.gateway.conftest import Hosts
from tests.gateway.test_router import A, B, C, router

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

    async with serving(made) as back:
        for ids, tokens in zip((first, second, third), cached, strict=True):
            asked = ask(ids, conversation=True)
            await until_it_would_resume(back, asked, tokens)
            if ids is third:
                relay.outage()
            found = await answered(back, asked)
            alone = await asyncio.to_thread(
                emulated.home[0].complete, ids, max_tokens=4, cache_salt="alone"
            )
            assert found.tokens == alone["choices"][0]["token_ids"]
            assert found.story.attempts == 1
        assert found.story.cluster == FAR and moved(back, "route") == (1, 1)
        assert back.state()["moves"]["under_way"] == []
        await until(lambda: found.story.cached_tokens == cached[1])
        relay.restore()
        await until(lambda: is_clean(back))
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_one_for_all_and_a_rest_after_a_failure() -> None:
    clock = FakeClock()
    subject = router(clock)
    for member in subject.members:
        member.kvd_url = "http://127.0.0.1:1"  # nobody is there
    move = PrefixCopy("route", B, A, (BlockHash(b"x"),), BLOCK)

    async with open_client() as calls, BackgroundCalls(0.0) as errands:
        moves = PrefixCopies(subject, calls, errands, clock)
        tally = moves.tallies["route"]

        async def tried(which: PrefixCopy) -> bool:
            task = moves.start(which, 5.0)
            if task is None:
                return False
            assert moves.start(which, 5.0) is task and moves.under_way == [which]
            await task
            return True

        assert await tried(move) and (tally.made, tally.failed) == (0, 1)
        assert not await tried(move), "the two are left alone for a while"
        assert await tried(move._replace(source=C)), "others are not"
        assert not await tried(move._replace(source=NodeId("nobody")))
        assert not await tried(move._replace(hashes=()))
        clock.advance(REST_S)
        assert await tried(move) and (tally.made, tally.failed) == (0, 3)
        assert moves.under_way == []
