"""A site is lost as a whole: a PD cluster and the gateway that planned. The next gateway that plans
plans for the PD cluster that is left, and for both when the other one returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from prfaas.errors import ConnectionLost
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.planning.coordination import Alone
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.long_term_loop import LongTermLoop
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.planning.role_changes import RoleChanges
from prfaas.http_client.client import open_client
from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.homes.regions import E0, E1, EAST, F0, NODES, W0, W1, WEST, regions
from tests.gateway.planning.kept import nothing_kept
from tests.gateway.reports import appear


class Elected(Alone):
    """Follows until it is elected, and keeps what it shows the other gateways."""

    shared: Mapping[ClusterId, Plan] | None = None

    @property
    def follows(self) -> bool:  # type: ignore[override]
        return not self.plans

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        self.shared = dict(plans)


async def test_the_next_planner_plans_without_the_lost_site_and_with_it_after_its_return() -> None:
    clock = FakeClock()
    made = regions(clock)
    fleet, router, deployment = made.fleet, made.router, made.deployment
    both = (EAST, WEST)
    router.follow({h: replace(plan, together=both) for h, plan in router.plans.items()})
    traffic = HomeTraffic(fleet.homes, clock.now(), deployment.scheduler.replan.window_s)
    kept = await nothing_kept(deployment, made.network, fleet, clock)
    coordination = Elected(traffic.histories, kept, plans=False)
    async with open_client() as http, BackgroundCalls(0.0) as calls:
        for member in fleet.members:
            member.kvd_url = "http://127.0.0.1:1"  # no process listens
        copies = PrefixCopies(fleet, http, calls, clock)
        evacuations = Evacuations(fleet, copies, calls, clock, deployment.scheduler.moves)
        roles = RoleChanges(fleet, evacuations, http, coordination)
        loop = LongTermLoop(fleet, router, roles, deployment, made.network, clock, coordination)
        await loop._step()
        before = router.plans[EAST]
        assert before.together == both and coordination.shared is None

        for node in (W0, W1):
            fleet.record_problem(made.member(node), "engine", ConnectionLost("it was killed"))
            fleet.record_problem(made.member(node), "kvd", ConnectionLost("it was killed"))
        await loop._step()
        assert router.plans[EAST] == before, "a gateway that follows makes no plan"
        clock.advance(2 * fleet.timeouts.first_plan_s)
        for node in (E0, E1, F0):
            appear(fleet, made.member(node), str(node), clock.now())
        coordination.plans = True
        await loop._step()
        left = router.plans[EAST]
        assert left.together == (EAST,) and left.capacity_rps > before.capacity_rps
        assert coordination.shared is not None and coordination.shared[EAST] == left

        for node in NODES[WEST]:
            appear(fleet, made.member(node), str(node), clock.now())
        await loop._step()
        assert all(plan.together == both for plan in router.plans.values())
        assert coordination.shared == dict(router.plans)
