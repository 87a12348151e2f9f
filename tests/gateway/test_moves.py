"""Copies that routes ask for and that do not come: a request goes on without them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from prfaas.transport.address import Address, parse_address
from prfaas.transport.wan import Relay
from prfaas.transport.wan_path import Conditions
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

BLOCK = 64


@pytest.fixture
def relay(emulated: Hosts) -> Iterator[Relay]:
    """In front of the kvd far away."""
    data = parse_address(emulated.far[0].stats(check=False)["data_address"], "data_address")
    with closing(Relay(Address("127.0.0.1", 0), data, Conditions()).start()) as started:
        yield started


def test_a_copy_that_does_not_come_is_computed(emulated: Hosts, relay: Relay) -> None:
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

    async def main() -> None:
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

    asyncio.run(main())
    emulated.wait_until_idle()
