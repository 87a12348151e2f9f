"""A fleet and a router over it whose nodes have answered; no process and no socket."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock
from prfaas.config.gateway import DEFAULTS, GatewaySection, GatewayTimeouts
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.placement import PlacementRequest
from prfaas.gateway.router import Router
from prfaas.gateway.tenants import Tenants
from prfaas.lateness import LateSince, never_late
from prfaas.scheduler.plan import plan_for_nodes, with_instances
from prfaas.scheduler.request import Request
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import THRESHOLD, deployment, problem, prompt
from tests.gateway.reports import appear

PD = ClusterId("pd")
A, B, C, F = (NodeId(name) for name in "abcf")
HOMES = [{"url": f"http://{n}:1", "kvd_url": f"http://{n}:2"} for n in "abc"]
FARS = [{"url": "http://f:1", "kvd_url": "http://f:2"}]
LONG, SHORT = 2 * THRESHOLD, THRESHOLD // 2


def fleet_and_router(
    clock: Clock,
    *,
    homes: Sequence[dict[str, str]] = HOMES,
    fars: Sequence[dict[str, str]] = FARS,
    limits: GatewaySection = DEFAULTS,
    late_since: LateSince = never_late,
    tenants: Collection[str] = ("",),
    **scheduler: object,
) -> tuple[Fleet, Router]:
    """All nodes answer: `a` prefills, `b` and `c` decode; `f` is the remote node."""
    made = msgspec.structs.replace(deployment(homes, fars, **scheduler), gateway=limits)
    solved = problem(made)
    fleet = Fleet(made, solved, clock, late_since)
    names = frozenset(tenants)
    router = Router(
        fleet, made.scheduler, clock, limits=limits, tenants=Tenants(limits, lambda: names)
    )
    for member, name in zip(fleet.members, "abcf", strict=True):
        appear(fleet, member, name, clock.now())
    plan = plan_for_nodes(
        with_instances(solved, (1,), 3),
        dict.fromkeys([A, B, C]),
        made.scheduler.replan,
        clock.now(),
        reason="test",
    )
    router.follow({fleet.homes[0]: plan})
    for node, role in plan.roles.items():
        fleet.assign_role(node, role)
    fleet.refresh()
    return fleet, router


def fall_silent(fleet: Fleet, clock: FakeClock, *silent: NodeId) -> None:
    """All members are asked, and these do not answer for a little longer than `silent_s`."""
    clock.advance(0.1)  # since they were heard
    for member in fleet.members:
        member.kvd.ask(clock.now())
        member.engine.ask(clock.now())
    clock.advance(fleet.timeouts.silent_s + 0.1)
    for member in fleet.members:
        if member.node not in silent:
            member.kvd.hear(clock.now())
            member.engine.hear(clock.now())
    if fleet.liveness.changed_verdicts():
        fleet.refresh()


def with_timeouts(**seconds: float) -> GatewaySection:
    return GatewaySection(timeouts=GatewayTimeouts(**seconds))


def member_of(fleet: Fleet, node: NodeId) -> Member:
    member = fleet.members.named(node)
    assert member is not None
    return member


def placement(
    tokens: int,
    clock: Clock,
    *avoid: NodeId,
    tenant: str = "",
    seed: int = 0,
    sequences: int = 1,
) -> PlacementRequest:
    hashes = PromptHashes(prompt(tokens, seed), salt=tenant)
    return PlacementRequest(
        Request(0, tokens, clock.now()),
        hashes,
        avoid,
        sequences=sequences,
        tenant=tenant,
        home=PD,
    )


async def place(router: Router, wanted: PlacementRequest) -> tuple[str, str]:
    """The prefill and the decode node."""
    route = (await router.place(wanted, 1.0)).route
    return route.prefill, route.decode


def step(fleet: Fleet, router: Router) -> None:
    """One step of the short-term loop."""
    fleet.update()
    router.adjust()
