"""A gateway among others: real polls of real endpoints, and an election at kvds in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

from prfaas.clock import MonotonicClock
from prfaas.contracts.gateway_api import NodeLoad, SharedPlan
from prfaas.contracts.kvd_api import ClaimPlanning, PlanningLease
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.peers.among import AmongGateways
from prfaas.gateway.peers.peers import PeerGateways
from prfaas.gateway.peers.plan_codec import encode_plans
from prfaas.gateway.planning.candidacy import RENEW_S
from prfaas.gateway.planning.election import Election
from prfaas.kvd.planning_lease import decide, first_promise
from prfaas.scheduler.homes.plans import home_name
from prfaas.scheduler.plan import Plan
from prfaas.testing.clock import FakeClock
from prfaas.types import ClusterId, NodeId
from tests.gateway.backends import until
from tests.gateway.homes.regions import E0, E1, EAST, WEST, Regions, regions
from tests.gateway.peer_gateways.gateways import Gateway, gateways, polling
from tests.waiting import PATIENCE_S


class Here(NamedTuple):
    """The gateway of `east`; `peer` is that of `west`."""

    among: AmongGateways
    election: Election
    peers: PeerGateways
    peer: Gateway
    made: Regions

    @property
    def plans(self) -> dict[ClusterId, Plan]:
        return dict(self.made.router.plans)

    async def until_planning(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.election.plans:
                await self.election.step()
                await asyncio.sleep(0.05)  # a candidate waits before it claims

    def shared(self, epoch: int, number: int, *draining: str) -> SharedPlan:
        threshold = 7_000 + number
        plans = {home: replace(p, threshold_tokens=threshold) for home, p in self.plans.items()}
        nodes = [NodeId(node) for node in draining]
        return encode_plans(plans, epoch, number, nodes, self.made.clock.now())


@asynccontextmanager
async def gateway_among() -> AsyncIterator[Here]:
    clock = MonotonicClock()
    made = regions(FakeClock())
    promise = first_promise(clock.now() - 60.0)

    async def claim(url: str, asked: ClaimPlanning) -> PlanningLease:
        nonlocal promise
        promise, lease = decide(promise, asked, clock.now())
        return lease

    async with gateways("west") as (peer,), polling([peer.entry]) as peers:
        election = Election("here", lambda: ["http://kvd:1"], claim, clock, peers.highest_epoch)
        problems = {home_name(home): home.problem for home in made.network.homes}
        rules = made.deployment.scheduler.replan
        traffic = HomeTraffic([EAST, WEST], clock.now(), rules.window_s)
        among = AmongGateways(peers, election, problems, rules, traffic, clock)
        renewing = asyncio.create_task(_renew(election))
        try:
            yield Here(among, election, peers, peer, made)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])


async def _renew(election: Election) -> None:
    while True:
        if election.plans:
            await election.step()
        await asyncio.sleep(RENEW_S)


async def test_it_follows_the_plan_of_another_and_each_later_one() -> None:
    async with gateway_among() as here:
        assert here.among.follows and here.among.newer_plans() is None
        here.peer.backend.plan_followed = here.shared(4, 1)
        here.peer.backend.plans = True
        await until(lambda: here.peers.newest_number == (4, 1))
        plans = here.among.newer_plans()
        assert plans is not None and plans[EAST].threshold_tokens == 7_001
        assert here.among.newer_plans() is None, "the same number is news once"
        assert here.among.epoch == 4
        here.peer.backend.plan_followed = here.shared(4, 2, "e1")
        await until(lambda: here.peers.newest_number == (4, 2))
        plans = here.among.newer_plans()
        assert plans is not None and plans[WEST].threshold_tokens == 7_002
        assert list(here.among.draining()) == [E1]
        here.peer.backend.plan_followed = here.shared(3, 9)  # of a planner before that
        await until(lambda: here.peers.living()[0].followed == (3, 9))
        assert here.among.newer_plans() is None


async def test_with_the_lease_it_plans_and_tells_the_others() -> None:
    async with gateway_among() as here:
        await here.until_planning()
        assert here.among.plans and not here.among.follows and here.among.epoch >= 1
        here.among.share(here.plans, [])
        first = here.among.shared_plan()
        assert first is not None and (first.epoch, first.number) == (here.among.epoch, 1)
        here.among.share(here.plans, [])
        again = here.among.shared_plan()
        assert again is not None and again.number == 1, "nothing has changed"
        here.among.share(here.plans, [E0])
        after = here.among.shared_plan()
        assert after is not None and after.number == 2 and after.draining == ("e0",)


async def test_a_higher_epoch_ends_its_planning() -> None:
    async with gateway_among() as here:
        await here.until_planning()
        here.among.share(here.plans, [])
        here.peer.backend.plan_followed = here.shared(here.among.epoch + 5, 1)
        await until(lambda: here.peers.highest_epoch() > here.election.epoch)
        assert here.among.follows
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
