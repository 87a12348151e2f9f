"""Roles and members of a live deployment: planned, recorded at the kvds, read by others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prfaas.config.deployment import Deployment
from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kvd_api import Heartbeat, KvdReport
from prfaas.errors import ConnectionLost, RequestError
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.planning.coordination import Alone
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.long_term_loop import LongTermLoop
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.planning.role_changes import RoleChanges
from prfaas.gateway.request import RequestTrace
from prfaas.http_client.client import open_client
from prfaas.scheduler.homes.plans import as_network
from prfaas.types import NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import (
    FAR,
    HOME,
    THRESHOLD,
    answered,
    gateway_request,
    in_use,
    is_clean,
    problem,
    prompt,
    serving,
    until,
    with_role,
)
from tests.gateway.backends import deployment as plain_deployment
from tests.gateway.conftest import Hosts
from tests.gateway.fleets import FARS, HOMES, PD, A, B, C, F, fleet_and_router, member_of
from tests.gateway.planning.kept import nothing_kept
from tests.gateway.reports import IDLE, appear


def roles_at_kvds(hosts: Hosts) -> dict[str, tuple[str, int]]:
    reports = [host.stats(check=False) for host in hosts.home]
    return {r["node"]: (r["role"]["role"], r["role"]["epoch"]) for r in reports}


def following(made: Deployment) -> Deployment:
    """The same for a gateway that does not plan."""
    return msgspec.structs.replace(made, gateway=msgspec.structs.replace(made.gateway, plans=False))


async def test_roles_are_recorded_and_survive_the_planner(emulated: Hosts) -> None:
    async def once(made: Deployment) -> tuple[list[str], list[str], dict[str, Any]]:
        async with serving(made) as backend:
            return with_role(backend, "prefill"), with_role(backend, "decode"), backend.plan()

    prefill, decode, plan = await once(emulated.deployment())
    assert len(prefill) == 1 and len(decode) == 2
    assert plan["threshold_tokens"] == THRESHOLD and plan["instances"] == {HOME: 3, FAR: 1}
    recorded = roles_at_kvds(emulated)
    assert {n for n, (role, _) in recorded.items() if role == "prefill"} == set(prefill)
    assert all(epoch >= 1 for _, epoch in recorded.values())
    for made in (emulated.deployment(), following(emulated.deployment())):
        assert (await once(made))[:2] == (prefill, decode)
        assert roles_at_kvds(emulated) == recorded, "nothing to change"


async def test_policy_local_plans_without_the_prfaas_cluster(emulated: Hosts) -> None:
    async with serving(emulated.deployment(policy="local")) as backend:
        assert backend.plan()["instances"] == {HOME: 3}


async def test_a_node_that_changes_its_role_finishes_its_work_first(emulated: Hosts) -> None:
    async with serving(emulated.deployment()) as backend:
        (prefills,) = with_role(backend, "prefill")
        trace = RequestTrace(0.0)
        async with backend.answer(gateway_request(prompt(70), 20_000), trace) as upstream:
            events = upstream.events()
            await anext(events)
            busy = NodeId(trace.decode)
            plan = backend.router.plans[PD]
            swapped = {**plan.roles, busy: "prefill", NodeId(prefills): "decode"}
            backend.router.follow({PD: replace(plan, roles=swapped)})
            await until(lambda: role_of(backend, prefills) == "decode")
            assert backend.fleet.roles.is_draining(busy) and role_of(backend, busy) == "decode"
            other = await answered(backend, gateway_request(prompt(70, 1)))
            assert other.trace.decode != busy, "it gets no new work"
        await until(lambda: role_of(backend, busy) == "prefill" and is_clean(backend))
        assert not backend.fleet.roles.is_draining(busy)
        assert (await answered(backend, gateway_request(prompt(70, 2)))).trace.prefill == busy
    await asyncio.to_thread(emulated.wait_until_idle)


def role_of(backend: GatewayBackend, name: str) -> str:
    return next(role for role in ("prefill", "decode") if name in with_role(backend, role))


async def test_nodes_that_register_are_as_good_as_listed_ones(emulated: Hosts) -> None:
    made = emulated.deployment()
    unlisted = [msgspec.structs.replace(cluster, nodes=[]) for cluster in made.clusters]
    made = msgspec.structs.replace(made, clusters=unlisted)

    def beat(host: Any, cluster: str) -> Heartbeat:
        report = msgspec.convert(host.stats(check=False), KvdReport)
        return Heartbeat(host.kvd_url, cluster, report)

    async with serving(made) as backend:
        with pytest.raises(RequestError) as refused:
            await backend.register(beat(emulated.far[0], "nowhere"))
        assert refused.value.status == 400 and "pd" in refused.value.message
        assert not backend.plan()["made"]
        # A request that comes before anybody can decode it waits.
        early = asyncio.create_task(answered(backend, gateway_request(prompt(2 * THRESHOLD, 7))))
        for host in emulated.home:
            await backend.register(beat(host, HOME))
        await backend.register(beat(emulated.far[0], FAR))
        await until(lambda: len(in_use(backend)) == 4)
        await early
        found = await answered(backend, gateway_request(prompt(2 * THRESHOLD, 8)))
        assert found.trace.prefill == "far0"
        await backend.register(beat(emulated.far[0], FAR))  # again and again
        assert sum(len(c["nodes"]) for c in backend.state()["clusters"]) == 4
    await asyncio.to_thread(emulated.wait_until_idle)


# Restarts -----------------------------------------------------------------------------------------


async def test_a_restart_is_no_reason_for_another_plan_until_the_node_is_forgotten() -> None:
    """A plan with one node less could drain another node for its role, and a node that returns
    keeps its own."""
    clock = FakeClock()
    async with open_client() as http, BackgroundCalls(0.0) as background_calls:
        fleet, router = fleet_and_router(clock)
        for member in fleet.members:
            member.kvd_url = "http://127.0.0.1:1"  # no process listens
        made = plain_deployment(HOMES, FARS)
        copies = PrefixCopies(fleet, http, background_calls, clock)
        evacuations = Evacuations(fleet, copies, background_calls, clock, made.scheduler.moves)
        traffic = HomeTraffic(fleet.homes, clock.now(), made.scheduler.replan.window_s)
        kept = await nothing_kept(made, as_network(problem(made)), fleet, clock)
        coordination = Alone(traffic.histories, kept, plans=True)
        roles = RoleChanges(fleet, evacuations, http, coordination)
        loop = LongTermLoop(fleet, router, roles, made, problem(made), clock, coordination)

        async def plans_after_step() -> list[str]:
            await loop._step()
            return [made.plan.reason for made in loop.history.plans]

        assert await plans_after_step() == []
        for node in (A, F):
            leaving = member_of(fleet, node)
            fleet.record_load(leaving, IDLE, leaving=True, asked_s=clock.now(), own=0)
            fleet.record_problem(leaving, "engine", ConnectionLost("it has exited"))
            assert await plans_after_step() == []
        assert not fleet.board.node(A).usable

        appear(fleet, member_of(fleet, A), "a", clock.now())
        assert await plans_after_step() == []
        assert fleet.board.node(A).usable and fleet.board.node(A).role == "prefill"

        clock.advance(DEFAULTS.timeouts.forget_s)
        for node in (A, B, C):
            appear(fleet, member_of(fleet, node), str(node), clock.now())
        assert await plans_after_step() == ["nodes came or went"], "f is not expected any more"
        fleet.record_problem(member_of(fleet, B), "engine", ConnectionLost("it has crashed"))
        assert await plans_after_step() == ["nodes came or went"] * 2
