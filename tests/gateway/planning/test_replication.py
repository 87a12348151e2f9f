"""A hot prefix whose only holder is saturated gets a second one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from prfaas.cache.hashing import PromptHashes
from prfaas.config.deployment import MovesSection
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.placement import PlacementRequest
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.planning.replication import LONGEST_WAIT_S, Replication, is_calm
from prfaas.http_client.client import open_client
from prfaas.scheduler.request import Request
from prfaas.types import HashEvent, LinkStats, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import is_clean, moved, prompt, serving, until, with_role
from tests.gateway.conftest import Hosts
from tests.gateway.fleets import PD, A, B, C, fleet_and_router, member_of
from tests.gateway.hot import SHARED_TOKENS, Crowd, deployment
from tests.gateway.peers import peer
from tests.gateway.reports import IDLE, NATIVE_BLOCK, NODE_CARD, add_native, native_compat, report
from tests.waiting import PATIENCE_S


@pytest.mark.slow
async def test_a_saturated_holder_gets_company(
    unassigned: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas.gateway.planning.prefix_copies")

    async with serving(deployment(unassigned, saturated_s=0.05)) as backend:
        crowd = Crowd(unassigned, backend, "replicating")
        holder = await crowd.warm()
        (name,) = set(with_role(backend, "prefill")) - {holder.stats()["node"]}
        other = unassigned.named(name)
        async with asyncio.timeout(PATIENCE_S):
            # On a busy machine, the gateway may look when the holder is idle again, or find a host
            # silent over which it would copy.
            while not moved(backend, "replicate")[0]:
                await crowd.burst(3)
        assert crowd.held_by(other) == SHARED_TOKENS
        before = other.hit_tokens()
        await crowd.burst(8)  # the holder is still the busier one
        assert other.hit_tokens() > before
        assert (other.hit_tokens() - before) % SHARED_TOKENS == 0, "it computes none of it"
        await until(lambda: is_clean(backend))
        metrics = {
            (sample.name, *sample.labels.values()): sample.value
            for family in backend.metrics()
            for sample in family.samples
        }
        assert metrics["prfaas_gateway_prefix_copies_total", "replicate", "made"] == 1
        assert metrics["prfaas_gateway_prefix_copied_tokens_total", "replicate"] == SHARED_TOKENS
        assert backend.state()["moves"]["replicate"]["bytes"] > 0
    await asyncio.to_thread(unassigned.wait_until_idle)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("replicate")]
    assert len(lines) == 1 and f"{SHARED_TOKENS} tokens" in lines[0]


# Decisions: kvds that never answer, so that copies stay under way ------------------------


PROMPTS = [PromptHashes(prompt(640, seed)) for seed in range(3)]


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def busy_fleet(clock: FakeClock, kvd_url: str) -> Fleet:
    """`a` and `b` prefill; `a` has every prompt, all are hot, and it has much to do."""
    fleet, router = fleet_and_router(clock, policy="local")
    for node, role in ((A, "prefill"), (B, "prefill"), (C, "decode")):
        fleet.assign_role(node, role)
    fleet.refresh()
    for member in fleet.members:
        member.kvd_url = kvd_url
        assert member.node is not None and fleet.prefixes.add(member, member.node)
    held = [hashed.at(64) for hashed in PROMPTS]
    chains = {
        "full": [name for chain in held for name in chain],
        "state": [chain[-1] for chain in held],
    }
    for seq, (group, names) in enumerate(chains.items()):
        assert fleet.manager.apply(HashEvent(seq, A, group, 64, tuple(names), "stored"))
    for hashed in PROMPTS:
        for _ in range(5):
            fleet.manager.observe(hashed, fleet.manager.match(hashed), clock.now())
    wanted = PlacementRequest(
        Request(0, 50_000, clock.now()), PromptHashes(prompt(50_000)), (B,), home=PD
    )
    assert (await router.place(wanted, 1.0)).route.prefill == A
    return fleet


async def started(clock: FakeClock, fleet: Fleet, steps_at_s: Sequence[float]) -> list[int]:
    """How many copies are under way after each step."""
    rules = MovesSection(every_s=1.0, at_once=2)
    found = []

    async with open_client() as http, BackgroundCalls(0.0) as background_calls:
        copies = PrefixCopies(fleet, http, background_calls, clock)
        evacuations = Evacuations(fleet, copies, background_calls, clock, rules)
        replication = Replication(fleet, copies, evacuations, clock, rules)
        for at_s in steps_at_s:
            clock.advance(at_s - clock.now())
            replication.step()
            assert {(m.source, m.target) for m in copies.under_way} <= {(A, B)}
            found.append(len(copies.under_way))
    return found


async def test_replications_are_few_and_far_between() -> None:
    clock = FakeClock()
    with silent() as url:
        fleet = await busy_fleet(clock, url)
        start_s = clock.now()
        steps = [start_s + later for later in (0.0, 0.5, 1.1, 1.5, 2.2)]
        assert await started(clock, fleet, steps) == [1, 1, 2, 2, 2]


async def test_a_busy_fabric_is_not_given_more() -> None:
    clock = FakeClock()
    with silent() as url:
        fleet = await busy_fleet(clock, url)
        holder = member_of(fleet, A)
        fleet.record_report(holder, report("a", links=(link(10**9, 2 * LONGEST_WAIT_S),)))
        assert await started(clock, fleet, [clock.now()]) == [0]
        fleet.record_report(holder, report("a", links=(link(10**9, LONGEST_WAIT_S / 2),)))
        assert await started(clock, fleet, [clock.now()]) == [1]


async def test_no_prefix_is_copied_to_a_node_with_another_format() -> None:
    """Neither because its holder is busy nor because it leaves: the same hashes name the same
    tokens there, and other state."""
    clock = FakeClock()
    with silent() as url:
        fleet = await busy_fleet(clock, url)
        upgraded = member_of(fleet, B)
        fleet.record_report(upgraded, report("b", instance="second", revision="2"))
        fleet.record_card(upgraded, NODE_CARD)
        fleet.refresh()
        assert len(fleet.sets) == 2
        assert fleet.prefixes.add(upgraded, B)
        assert await started(clock, fleet, [clock.now()]) == [0]
        fleet.record_load(member_of(fleet, A), IDLE, leaving=True, asked_s=clock.now(), own=0)
        fleet.drain(C)  # the only other node of the format
        assert await started(clock, fleet, [clock.now()]) == [0]


@pytest.mark.parametrize("why", ["replicate", "evacuate"])
async def test_a_prefix_of_a_second_pool_goes_to_the_second_pool_of_another_node(why: str) -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock, policy="local")
    for node, role in ((A, "prefill"), (B, "prefill"), (C, "decode")):
        fleet.assign_role(node, role)
    add_native(fleet, A, B, C)
    names = [NodeId(f"{node}/native") for node in (A, B, C)]
    for node, name in zip((A, B, C), names, strict=True):
        assert fleet.prefixes.add(member_of(fleet, node), name)
        assert fleet.prefixes.add(member_of(fleet, node), node)
    chain = PROMPTS[0].at(NATIVE_BLOCK)
    for seq, (group, held) in enumerate({"blocks": chain, "slots": chain[-1:]}.items()):
        event = HashEvent(seq, names[0], group, NATIVE_BLOCK, tuple(held), "stored")
        assert fleet.manager.apply(event)
    for _ in range(5):
        fleet.manager.observe(PROMPTS[0], fleet.manager.match(PROMPTS[0]), clock.now())
    if why == "replicate":
        long = PromptHashes(prompt(50_000))
        wanted = PlacementRequest(Request(0, 50_000, clock.now()), long, (B,), home=PD)
        assert (await router.place(wanted, 1.0)).route.prefill == A
    else:
        fleet.record_load(member_of(fleet, A), IDLE, leaving=True, asked_s=clock.now(), own=0)
    rules = MovesSection(every_s=1.0, at_once=2)
    async with peer() as kvd, open_client() as http, BackgroundCalls(0.0) as background_calls:
        member_of(fleet, B).kvd_url = kvd.url
        copies = PrefixCopies(fleet, http, background_calls, clock)
        evacuations = Evacuations(fleet, copies, background_calls, clock, rules)
        Replication(fleet, copies, evacuations, clock, rules).step()
        (asked,) = await kvd.requested("POST /v1/pull")
        assert asked["source"] == member_of(fleet, A).kvd_url
        assert asked["compat"] == msgspec.to_builtins(native_compat())
        assert len(asked["hashes"]) == len(chain)
        assert [(c.why, c.source, c.target) for c in copies.under_way] == [(why, A, B)]


def link(backlog_bytes: int, waited_s: float) -> LinkStats:
    return LinkStats(
        peer="b:7400",
        at_s=1.0,
        connections=1,
        goodput_bps=1e9,
        backlog_bytes=backlog_bytes,
        in_flight_bytes=0,
        waited_s=waited_s,
        rtt_s=0.001,
        delivery_bps=1e9,
        retransmitted_segments=0,
        congestion_window_bytes=None,
    )


def test_a_sender_that_has_enough_to_do_is_left_alone() -> None:
    soon, late = link(1000, LONGEST_WAIT_S / 2), link(1000, 2 * LONGEST_WAIT_S)
    assert is_calm(report("a"))
    assert is_calm(report("a", links=(link(0, 0.0), soon)))
    assert not is_calm(report("a", links=(soon, late)))
