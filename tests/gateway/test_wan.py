"""A WAN between the clusters that goes away, or gets slow, and recovers: nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.request import GatewayRequest
from prfaas.scheduler.congestion import LinkVerdict
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.gateway.backends import (
    FAR,
    THRESHOLD,
    Answered,
    answered,
    deployment,
    gateway_request,
    is_clean,
    node,
    prompt,
    serving,
    until,
)
from tests.gateway.conftest import Hosts, through

SLOW_BPS = 500_000.0
# Hand-offs of so many long prompts take eight seconds at that rate. A transfer has ten seconds to
# be opened, behind the others.
AT_ONCE = 20
LONG = 4 * THRESHOLD  # offloaded while a link that was cut is still under suspicion


def link_is_up(backend: GatewayBackend) -> bool:
    up: bool = wan(backend)["up"]
    return up


def wan(backend: GatewayBackend) -> dict[str, Any]:
    (link,) = backend.state()["links"]
    found: dict[str, Any] = link
    return found


async def test_a_cut_wan_costs_time_and_nothing_else(emulated: Hosts, relays: list[Relay]) -> None:
    made = deployment(through(relays, emulated), [node(host) for host in emulated.far])

    async with serving(made) as backend:
        found = await answered(backend, gateway_request(prompt(LONG, 20)))
        assert found.trace.offloaded
        assert sum(relay.stats.to_target_bytes for relay in relays) > 0
        for relay in relays:
            relay.outage()
        found = await answered(backend, gateway_request(prompt(LONG, 21)))
        assert not found.trace.offloaded and found.trace.attempts == 2
        assert "cut" in found.trace.failures[0] and not link_is_up(backend)
        found = await answered(backend, gateway_request(prompt(LONG, 22)))
        assert not found.trace.offloaded and found.trace.attempts == 1, "it is known by now"
        for relay in relays:
            relay.restore()
        await until(lambda: link_is_up(backend))
        found = await answered(backend, gateway_request(prompt(LONG, 23)))
        assert found.trace.offloaded and found.trace.attempts == 1
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


@pytest.mark.parametrize("policy", ["paper", pytest.param("adaptive", marks=pytest.mark.slow)])
async def test_a_slow_wan_is_left_alone_until_it_recovers(
    unassigned: Hosts, relays: list[Relay], policy: str
) -> None:
    """The gateway learns the rate from what the senders report while hand-offs are under way."""
    made = deployment(
        through(relays, unassigned),
        [node(host) for host in unassigned.far],
        prefill=2,  # one node decodes: all hand-offs go through one relay, whose rate is the link's
        policy=policy,
        paper={"hold_s": 1.0},
    )
    somewhat_long = THRESHOLD + THRESHOLD // 2  # below twice the threshold

    def question(tokens: int, seed: int) -> GatewayRequest:
        return gateway_request(
            prompt(tokens, seed), salt=f"slow, {policy}"
        )  # nothing of it is cached

    def offloads(backend: GatewayBackend, asked: GatewayRequest) -> bool:
        return bool(backend.explain(asked)["chosen"].get("offloaded"))

    def transfer_s(backend: GatewayBackend, asked: GatewayRequest) -> float:
        """As predicted for a prefill far away."""
        options = backend.explain(asked)["alternatives"]
        found: float = next(o["transfer_s"] for o in options if o["cluster"] == FAR)
        return found

    def rate_is_known(backend: GatewayBackend) -> bool:
        """What passes the relay, not what it takes in."""
        found = wan(backend)
        believed = found["believed_bps"]
        return (
            found["verdict"] != LinkVerdict.CLEAR
            and believed is not None
            and SLOW_BPS / 2 <= believed <= 2 * SLOW_BPS
        )

    async with serving(made) as backend:
        assert (await answered(backend, question(somewhat_long, 30))).trace.offloaded
        await until(lambda: wan(backend)["verdict"] == LinkVerdict.CLEAR)
        for relay in relays:
            relay.change(Conditions(rate_bps=SLOW_BPS))
        slowly: list[asyncio.Task[Answered]] = []

        def busy_until_the_rate_is_known() -> bool:
            missing = AT_ONCE - sum(not task.done() for task in slowly)
            seeds = range(100 + len(slowly), 100 + len(slowly) + missing)
            more = [answered(backend, question(LONG, seed)) for seed in seeds]
            slowly.extend(map(asyncio.create_task, more))
            return rate_is_known(backend)

        await until(busy_until_the_rate_is_known)
        meanwhile = question(somewhat_long, 32)
        await until(lambda: not offloads(backend, meanwhile))
        # Before anything is waited for: on a busy machine all hand-offs may have arrived by the
        # time of the next answer, and then the link is not believed to be slow any more.
        slow_s = transfer_s(backend, meanwhile)
        at_home = await answered(backend, meanwhile)
        assert not at_home.trace.offloaded and at_home.trace.attempts == 1
        for relay in relays:
            relay.change(Conditions())
        traces = [one.trace for one in await asyncio.gather(*slowly)]
        assert any(trace.offloaded for trace in traces)
        failures = [failure for trace in traces for failure in trace.failures]
        assert not [f for f in failures if "cut" in f], "a slow link was taken for a cut one"
        await until(lambda: wan(backend)["verdict"] == LinkVerdict.CLEAR)
        last = question(somewhat_long, 33)
        await until(lambda: transfer_s(backend, last) < slow_s / 10)
        if policy == "paper":  # the other one also heeds how busy this machine makes each node
            await until(lambda: offloads(backend, last))
            assert (await answered(backend, last)).trace.offloaded
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(unassigned.wait_until_idle)
