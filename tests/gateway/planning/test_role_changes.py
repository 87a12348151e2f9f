"""Roles at a gateway that follows: another gateway changes them, and the kvds record them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prfaas.config.deployment import MovesSection
from prfaas.contracts.kvd_api import Role, RoleName
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.planning.role_changes import STEPS_TO_WAIT, RoleChanges
from prfaas.http_client.client import open_client
from prfaas.scheduler.long_term.traffic import TrafficWindow
from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import PD, B, fleet_and_router, member_of
from tests.gateway.reports import report


@dataclass
class Following:
    """What this gateway hears of the one that plans."""

    plans: bool = False
    follows: bool = True
    epoch: int = 1
    term: int = 1
    is_informed: bool = True
    drains: set[NodeId] = field(default_factory=set)

    def draining(self) -> Collection[NodeId]:
        return self.drains

    def newer_plans(self) -> Mapping[ClusterId, Plan] | None:
        return None

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        raise AssertionError("a gateway that follows shares nothing")

    def has_left(self, node: NodeId) -> bool:
        raise AssertionError("a gateway that follows waits for no other")

    def window(
        self,
        home: ClusterId,
        now_s: float,
        live_remotes: tuple[int, ...],
        live_local: Set[NodeId],
        paces: Mapping[ClusterId, float],
    ) -> TrafficWindow:
        raise AssertionError("a gateway that follows evaluates no traffic")


class Here(NamedTuple):
    fleet: Fleet
    roles: RoleChanges
    planner: Following
    plan: Plan  # in which `b`, which decodes now, prefills

    def record(self, role: RoleName) -> None:
        """The next report of `b`'s kvd."""
        self.fleet.record_report(member_of(self.fleet, B), report("b", role=Role(role, epoch=1)))

    async def step(self, times: int = 1) -> tuple[str | None, bool]:
        """The role of `b` here, and whether it is in use."""
        for _ in range(times):
            await self.roles.apply(self.plan, [B])
            self.fleet.refresh()
        return self.fleet.roles.of(B), self.fleet.board.node(B).usable


@asynccontextmanager
async def follower() -> AsyncIterator[Here]:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    plan = router.plans[PD]
    assert plan.roles[B] == "decode"
    planner = Following()
    async with open_client() as http, BackgroundCalls(1.0) as calls:
        copies = PrefixCopies(fleet, http, calls, clock)
        evacuations = Evacuations(fleet, copies, calls, clock, MovesSection())
        roles = RoleChanges(fleet, evacuations, http, planner)
        here = Here(fleet, roles, planner, replace(plan, roles={**plan.roles, B: "prefill"}))
        here.record("decode")
        yield here


async def test_a_node_that_drains_gets_its_new_role_when_its_kvd_has_recorded_it() -> None:
    async with follower() as here:
        here.planner.drains.add(B)
        assert await here.step() == ("decode", False)
        here.planner.drains.clear()  # the planner has written the role; the report is older
        assert await here.step() == ("decode", False), "not in use in the role that it had"
        here.record("prefill")
        assert await here.step() == ("prefill", True)


async def test_a_change_that_was_given_up_leaves_the_node_its_role() -> None:
    async with follower() as here:
        for _ in range(2):  # the second time it waits as long as the first time
            here.planner.drains.add(B)
            assert await here.step() == ("decode", False)
            here.planner.drains.clear()
            assert await here.step(STEPS_TO_WAIT - 1) == ("decode", False)
            assert await here.step() == ("decode", True)


async def test_a_wait_that_has_ended_well_does_not_shorten_the_next_one() -> None:
    async with follower() as here:
        here.planner.drains.add(B)
        await here.step()
        here.planner.drains.clear()
        await here.step(STEPS_TO_WAIT - 1)
        here.record("prefill")
        assert await here.step() == ("prefill", True)
        here = here._replace(plan=replace(here.plan, roles={**here.plan.roles, B: "decode"}))
        here.planner.drains.add(B)
        assert await here.step() == ("prefill", False)
        here.planner.drains.clear()
        assert await here.step(STEPS_TO_WAIT - 1) == ("prefill", False)


async def test_a_node_that_does_not_drain_has_the_role_that_its_kvd_has_recorded() -> None:
    async with follower() as here:
        assert await here.step() == ("decode", True), "the planner has not begun"
        here.record("prefill")
        assert await here.step() == ("prefill", True)
