"""A gateway among others: real polls of real endpoints, and an election and a plan at kvds in
memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

from prfaas.clock import MonotonicClock
from prfaas.contracts.gateway_api import NodeLoad
from prfaas.contracts.kvd_api import ClaimPlanning, PlanningLease
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.peers.among import AmongGateways
from prfaas.gateway.peers.peers import PeerGateways
from prfaas.gateway.planning.candidacy import RENEW_S
from prfaas.gateway.planning.election import Election
from prfaas.gateway.planning.kept_plans import PLAN, KeptPlans
from prfaas.kvd.planning_lease import decide, first_promise
from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import until
from tests.gateway.homes.regions import E0, E1, EAST, WEST, Regions, regions
from tests.gateway.peer_gateways.gateways import Gateway, gateways, polling
from tests.gateway.planning import kept
from tests.waiting import PATIENCE_S


class Here(NamedTuple):
    """The gateway of `east`; `peer` is that of `west`."""

    among: AmongGateways
    election: Election
    peers: PeerGateways
    peer: Gateway
    made: Regions
    site: kept.Site
    records: kept.Gateway
    others_records: kept.Gateway
    others_plans: KeptPlans

    @property
    def plans(self) -> dict[ClusterId, Plan]:
        return dict(self.made.router.plans)

    async def until_planning(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.election.plans:
                await self.election.step()
                await asyncio.sleep(0.05)  # a candidate waits before it claims

    async def other_shares(self, threshold: int, epoch: int, draining: Sequence[NodeId]) -> None:
        """The gateway of `west` has its plan kept, and this one looks."""
        plans = {home: replace(p, threshold_tokens=threshold) for home, p in self.plans.items()}
        self.others_plans.share(plans, draining, epoch)
        await self.others_records.step()
        await self.records.step()


@asynccontextmanager
async def gateway_among() -> AsyncIterator[Here]:
    clock = MonotonicClock()
    made = regions(FakeClock())
    promise = first_promise(clock.now() - 60.0)

    async def claim(url: str, asked: ClaimPlanning) -> PlanningLease:
        nonlocal promise
        promise, lease = decide(promise, asked, clock.now())
        return lease

    site = kept.Site(3)
    records, others = (site.gateway([PLAN], leased=PLAN) for _ in range(2))
    await records.step()
    await others.step()
    async with gateways("west") as (peer,), polling([peer.entry]) as peers:
        window_s = made.deployment.scheduler.replan.window_s
        traffic = HomeTraffic([EAST, WEST], clock.now(), window_s)
        plans, others_plans = (
            KeptPlans(one.records, made.deployment, made.network, site.clock)
            for one in (records, others)
        )
        election = Election(
            "here",
            lambda: ["http://kvd:1"],
            claim,
            clock,
            lambda: max(peers.highest_epoch(), plans.epoch),
        )
        among = AmongGateways(peers, election, plans, traffic, clock)
        renewing = asyncio.create_task(_renew(election))
        try:
            yield Here(among, election, peers, peer, made, site, records, others, others_plans)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])


async def _renew(election: Election) -> None:
    while True:
        if election.plans:
            await election.step()
        await asyncio.sleep(RENEW_S)


async def test_it_follows_the_plan_that_is_kept_and_each_later_one() -> None:
    async with gateway_among() as here:
        assert here.among.follows and here.among.newer_plans() is None
        await here.other_shares(7_001, 4, [])
        plans = here.among.newer_plans()
        assert plans is not None and plans[EAST].threshold_tokens == 7_001
        assert here.among.newer_plans() is None, "the same number is news once"
        assert here.among.epoch == 4 and here.among.followed == (4, 1)
        await here.other_shares(7_002, 4, [E1])
        plans = here.among.newer_plans()
        assert plans is not None and plans[WEST].threshold_tokens == 7_002
        assert list(here.among.draining()) == [E1] and here.among.followed == (4, 2)
        await here.other_shares(7_003, 3, [])  # of a planner before that
        assert here.among.newer_plans() is None


async def test_the_age_of_a_plan_is_that_of_when_it_was_made() -> None:
    async with gateway_among() as here:
        here.site.clock.advance(100.0)
        await here.others_records.step()
        plans = {
            home: replace(plan, made_s=95.0, converted_s={E0: 90.0})
            for home, plan in here.plans.items()
        }
        here.others_plans.share(plans, [], 4)
        await here.others_records.step()
        here.site.clock.advance(20.0)
        await here.records.step()
        found = here.among.newer_plans()
        assert found is not None
        assert found[EAST].made_s == 95.0 and found[EAST].converted_s == {E0: 90.0}


async def test_with_the_lease_it_plans_and_has_the_plan_kept() -> None:
    async with gateway_among() as here:
        await here.until_planning()
        assert here.among.plans and not here.among.follows and here.among.epoch >= 1
        epoch = here.among.epoch
        here.among.share(here.plans, [])
        assert here.among.followed == (epoch, 1)
        here.among.share(here.plans, [])
        assert here.among.followed == (epoch, 1), "nothing has changed"
        here.among.share(here.plans, [E0])
        await here.records.step()
        versions = kept.kept_at(here.site, PLAN).values()
        assert {(v.epoch, v.number) for v in versions if v is not None} == {(epoch, 2)}
        await here.others_records.step()
        found = here.others_plans.newer()
        assert found is not None and found[EAST].roles == here.plans[EAST].roles
        assert list(here.others_plans.draining) == [E0]


async def test_what_another_gateway_says_does_not_end_its_planning() -> None:
    async with gateway_among() as here:
        await here.until_planning()
        here.peer.backend.epoch = here.among.epoch + 1_000_000
        await until(lambda: here.peers.highest_epoch() > here.election.epoch)
        assert here.among.plans and here.among.majority_epoch == here.among.epoch


async def test_a_later_plan_ends_its_planning_until_its_epoch_is_later() -> None:
    async with gateway_among() as here:
        await here.until_planning()
        here.among.share(here.plans, [])
        later = here.among.epoch + 5
        await here.other_shares(7_001, later, [])
        assert here.election.plans and here.among.follows
        assert here.among.newer_plans() is not None
        await until(lambda: here.among.plans)
        assert here.among.epoch > later


async def test_a_plan_that_is_none_is_ignored() -> None:
    async with gateway_among() as here:
        await here.other_shares(7_001, 4, [])
        assert here.among.newer_plans() is not None
        found = here.records.records.found(PLAN)
        assert found is not None
        odd = found._replace(number=9)  # the plan says another number
        here.others_records.records.want(odd)
        await here.others_records.step()
        await here.records.step()
        assert here.records.records.found(PLAN) == odd
        assert here.among.newer_plans() is None and here.among.followed == (4, 1)
        await here.other_shares(7_002, 5, [])
        assert here.among.newer_plans() is not None


async def test_a_node_drains_when_the_others_know_it_and_have_nothing_there() -> None:
    async with gateway_among() as here:
        await here.until_planning()
        here.among.share(here.plans, [])
        assert not here.among.has_left(E0), "it does not drain"
        here.among.share(here.plans, [E0])
        here.peer.backend.loads = {"e0": NodeLoad(0, 0.0, 1)}
        await until(lambda: here.peers.others_at(E0, MonotonicClock().now()).decodes == 1)
        here.peer.backend.draining = ("e0",)
        await until(lambda: here.peers.living()[0].draining == {"e0"})
        assert not here.among.has_left(E0), "the other gateway has a request there"
        here.peer.backend.loads = {}
        await until(lambda: here.among.has_left(E0))
        here.among.share(here.plans, [E0, E1])
        assert not here.among.has_left(E1), "the other gateway has not heard of it"
        await here.peer.kill()
        await until(lambda: here.among.has_left(E1))
