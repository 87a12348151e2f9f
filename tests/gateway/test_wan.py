"""A WAN between the clusters that goes away and comes back: nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from prfaas.gateway.backend import Back
from prfaas.transport.address import Address, parse_address
from prfaas.transport.wan import Relay
from prfaas.transport.wan_path import Conditions
from tests.gateway.backs import (
    THRESHOLD,
    answered,
    ask,
    deployment,
    is_clean,
    node,
    prompt,
    serving,
    until,
)
from tests.gateway.conftest import Hosts

LONG = 4 * THRESHOLD  # offloaded while a link that was cut is still under suspicion


@pytest.fixture
def relays(emulated: Hosts) -> Iterator[list[Relay]]:
    """In front of every kvd at home."""
    with ExitStack() as stack:
        relays = []
        for host in emulated.home:
            data = parse_address(host.stats(check=False)["data_address"], "data_address")
            relay = Relay(Address("127.0.0.1", 0), data, Conditions())
            relays.append(stack.enter_context(closing(relay)).start())
        yield relays


def link_is_up(back: Back) -> bool:
    (link,) = back.state()["links"]
    up: bool = link["up"]
    return up


def test_a_cut_wan_costs_time_and_nothing_else(emulated: Hosts, relays: list[Relay]) -> None:
    home = [
        {**node(host), "via": str(relay.address)}
        for host, relay in zip(emulated.home, relays, strict=True)
    ]
    made = deployment(home, [node(host) for host in emulated.far])

    async def main() -> None:
        async with serving(made) as back:
            found = await answered(back, ask(prompt(LONG, 20)))
            assert found.story.offloaded
            assert sum(relay.stats.to_target_bytes for relay in relays) > 0
            for relay in relays:
                relay.outage()
            found = await answered(back, ask(prompt(LONG, 21)))
            assert not found.story.offloaded and found.story.attempts == 2
            assert "cut" in found.story.failures[0] and not link_is_up(back)
            found = await answered(back, ask(prompt(LONG, 22)))
            assert not found.story.offloaded and found.story.attempts == 1, "it is known by now"
            for relay in relays:
                relay.restore()
            await until(lambda: link_is_up(back))
            found = await answered(back, ask(prompt(LONG, 23)))
            assert found.story.offloaded and found.story.attempts == 1
            await until(lambda: is_clean(back))

    asyncio.run(main())
    emulated.wait_until_idle()
