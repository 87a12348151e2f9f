"""Eleven requests that are slow for eleven reasons: `prfaas trace` names the reason of each.

The only assertion is the cause that is named first. The faults are so large that on a busy machine
everything else in the request is smaller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from prfaas.clock import MonotonicClock
from prfaas.config.address import Address, parse_address
from prfaas.contracts.trace_api import FollowedRequest
from prfaas.measure.client import connect
from prfaas.tracing.spans import TRANSFER_ID
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.tracing.slow_ways.conftest import Stage
from tests.tracing.slow_ways.deployment import (
    FAR,
    LONG,
    NEAR,
    SLOTS,
    TIME,
    SlowDeployment,
    planned,
    until,
)

pytestmark = pytest.mark.slow
FAR_NODE = f"{FAR}-0"
SHORT = 600
ENOUGH_S = 4.0  # that a fault lasts: a few times the prefill of a long prompt


async def has_load(live: SlowDeployment, node: str, requests: int) -> bool:
    return await live.load(node) >= requests


@asynccontextmanager
async def queue(live: SlowDeployment, node: str, requests: int) -> AsyncIterator[None]:
    """A node whose engine another client has given long prompts.

    The gateway tokenises none of them: a request waits in the engine's queue and nowhere else.
    """
    async with live.directly(node) as engine:
        bodies = [live.body((f"other {n}", 3 * LONG), output_tokens=1) for n in range(requests)]
        others = [asyncio.create_task(engine.complete(body)) for body in bodies]
        try:
            # Not all: on a busy machine the first have ended before the last ones arrive.
            await until(lambda: has_load(live, node, requests // 2))
            yield
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def test_a_cold_cache(stage: Stage) -> None:
    async def run() -> None:
        async with stage.hosts.gateway() as live:
            answer = await live.ask(live.body(("cold", 4 * LONG)))
            await live.check_cause(answer, "cold cache")

    stage.run(run())


def test_a_lost_state(stage: Stage) -> None:
    """The first part of the prompt is cached as the beginning of a longer one: its blocks are
    there, but the states of linear layers are those of the longer prompt's end."""

    async def run() -> None:
        async with stage.hosts.gateway() as live:
            before = live.body(("common", 2 * LONG), ("first end", LONG))
            await live.ask(before)
            await until(lambda: is_cached(live, before))
            answer = await live.ask(live.body(("common", 2 * LONG), ("other end", SHORT)))
            await live.check_cause(answer, "lost state")

    async def is_cached(live: SlowDeployment, body: bytes) -> bool:
        chosen = (await live.explain(body))["chosen"]
        return bool(chosen.get("cached_tokens", 0) > LONG)

    stage.run(run())


def test_a_slow_prefill(stage: Stage, tmp_path: Path) -> None:
    """The gateway believes in engines that are eight times as fast."""

    async def run() -> None:
        fast = planned(tmp_path, TIME / 8).deployment
        async with stage.hosts.gateway(fast) as live:
            answer = await live.ask(live.body(("slow", 4 * LONG)))
            await live.check_cause(answer, "slow prefill")

    stage.run(run())


def test_a_full_queue(stage: Stage) -> None:
    async def run() -> None:
        async with stage.hosts.gateway() as live, queue(live, FAR_NODE, requests=8):
            answer = await live.ask(live.body(("queued", LONG // 4)))
            await live.check_cause(answer, "full queue")

    stage.run(run())


def test_no_node_that_may_decode(stage: Stage) -> None:
    """The PD cluster is drained: the request waits, and no queue is full."""

    async def run() -> None:
        async with stage.hosts.gateway() as live:
            await live.drain(NEAR, drained=True)
            asking = asyncio.create_task(live.ask(live.body(("unserved", SHORT))))

            async def has_waited() -> bool:
                latest = await live.latest()
                if latest is None or latest.request.total_s < ENOUGH_S:
                    return False
                assert latest.causes[0].kind == "not served", latest.causes
                assert f"{NEAR} is drained" in latest.causes[0].text
                return True

            try:
                await until(has_waited)
                (home,) = (await live.live.state())["homes"]
                assert (home["service"], home["reason"]) == ("unserved", f"{NEAR} is drained")
            finally:
                await live.drain(NEAR, drained=False)
            await live.check_cause(await asking, "not served")

    stage.run(run())


def test_a_slow_link(stage: Stage) -> None:
    async def run() -> None:
        async with stage.hosts.gateway() as live:
            (wan,) = [one for one in live.live.deployment.links if one.source == FAR]
            live.relay.write_line("gbps 0.002")
            try:
                answer = await live.ask(live.body(("slow link", LONG)))
            finally:
                live.relay.write_line(f"gbps {wan.gbps:g}")
            await live.check_cause(answer, "slow link")

    stage.run(run())


def test_a_cut_link(stage: Stage) -> None:
    async def run() -> None:
        async with stage.hosts.gateway() as live:
            live.relay.write_line("outage")
            live.relay.write_line("cut")
            try:
                answer = await live.ask(live.body(("cut link", LONG)))
            finally:
                live.relay.write_line("restore")
            await live.check_cause(answer, "cut link")

    stage.run(run())


def test_a_busy_decode_node(stage: Stage) -> None:
    """Another client has filled the batch of the decode node."""

    async def run() -> None:
        async with stage.hosts.gateway() as live:
            name = await live.with_role("decode")
            async with live.directly(name) as node:
                filled = live.body(("busy", SHORT), output_tokens=300, choices=SLOTS)
                filling = asyncio.create_task(node.complete(filled))
                await until(lambda: has_load(live, name, SLOTS))
                answer = await live.ask(live.body(("waits", LONG // 4)))
                await filling
            await live.check_cause(answer, "busy decode")

    stage.run(run())


def test_a_retry(stage: Stage) -> None:
    """An operator aborts the transfer at the decode node's kvd, while the prefill waits."""

    async def run() -> None:
        async with stage.hosts.gateway() as live, queue(live, FAR_NODE, requests=16):
            asking = asyncio.create_task(live.ask(live.body(("retried", LONG // 4))))
            found: list[FollowedRequest] = []

            async def has_waited() -> bool:
                latest = await live.latest()
                assert not asking.done(), "its prefill waits for those of the others"
                if latest is None or latest.request.total_s < ENOUGH_S:
                    return False
                found.append(latest)
                return True

            await until(has_waited)
            (transfer,) = {
                str(span.attributes[TRANSFER_ID])
                for span in found[-1].spans
                if TRANSFER_ID in span.attributes
            }
            kvd = live.live.hosts.kvds[found[-1].request.decode].http
            url = f"{kvd}/v1/transfers/{transfer}/abort"
            body = b'{"reason":"aborted by an operator"}'
            await live.live.http.request("POST", url, timeout_s=ENOUGH_S, body=body)
            answer = await asking
            await live.check_cause(answer, "retry")

    stage.run(run())


def test_a_big_body(stage: Stage) -> None:
    """The client's way to the gateway is slow."""

    async def run() -> None:
        async with stage.hosts.gateway() as live:
            to = parse_address(live.live.gateway_url.removeprefix("http://"), "gateway")
            slow = Conditions(rate_bps=1e6)
            with closing(Relay(Address("127.0.0.1", 0), to, slow).start()) as relay:
                async with connect(f"http://{relay.address}", MonotonicClock()) as target:
                    body = live.body(("big", SHORT)) + b" " * 500_000
                    answer = await live.ask(body, target)
            await live.check_cause(answer, "big body")

    stage.run(run())


def test_a_hung_node(stage: Stage) -> None:
    async def run() -> None:
        options = ("silent_s", "unresponsive_s")
        longer = [f"gateway.timeouts.{name}={ENOUGH_S:g}" for name in options]
        settings = [word for key in longer for word in ("--set", key)]
        async with stage.hosts.gateway(options=settings) as live:
            live.node(FAR_NODE).freeze()
            try:
                answer = await live.ask(live.body(("hung", LONG // 4)))
                await live.check_cause(answer, "hung node")
            finally:
                live.node(FAR_NODE).thaw()

    stage.run(run())
