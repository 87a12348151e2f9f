"""A small network: two PD clusters, `east` and `west`, share two PrfaaS clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prfaas.config.deployment import SchedulerSection
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.problem import Path, Pool, Problem, Remote
from prfaas.scheduler.board import Board
from prfaas.scheduler.costs import build_costs
from prfaas.scheduler.homes.elsewhere import HomeContext
from prfaas.scheduler.homes.plans import first_plans, home_name
from prfaas.scheduler.plan import with_instances
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import LinkView
from prfaas.types import ClusterId, NodeId
from tests.planner.builders import FAST, SLOW, pool, problem

EAST, WEST = ClusterId("east"), ClusterId("west")
NORTH, SOUTH = ClusterId("north"), ClusterId("south")
ROUND_TRIPS = {(EAST, WEST): 0.05, (WEST, EAST): 0.05}
LONG = 4000  # tokens, above every threshold


def home(name: ClusterId, paths: dict[ClusterId, Path], pd: int = 4) -> Problem:
    given = problem(pd=pd, bs_max=40)
    remotes = tuple(Remote(pool(cluster, 2, FAST), path) for cluster, path in paths.items())
    return replace(given, remotes=remotes, local=replace(given.local, pool=pool(name, pd, SLOW)))


NETWORK = NetworkProblem(
    (
        Home(0.6, home(EAST, {NORTH: Path(1e9, 0.01), SOUTH: Path(2e7, 0.03)})),
        Home(0.4, home(WEST, {NORTH: Path(3e7, 0.03), SOUTH: Path(1e9, 0.01)})),
    )
)
NODES = {name: [NodeId(f"{name}-{k}") for k in range(4)] for name in (EAST, WEST)}


def network_with(network: NetworkProblem, instances: Mapping[ClusterId, int]) -> NetworkProblem:
    """The network with these live instances. A cluster that is not named keeps its instances."""

    def live(problem: Problem) -> Problem:
        def count(pool: Pool) -> int:
            return instances.get(ClusterId(pool.cluster), pool.instances)

        remotes = [count(remote.pool) for remote in problem.remotes]
        return with_instances(problem, remotes, count(problem.local.pool))

    return network.with_homes(live)


def board() -> Board:
    remotes = [(name, [NodeId(f"{name}-{k}") for k in range(2)]) for name in (NORTH, SOUTH)]
    links = {
        (ClusterId(remote.pool.cluster), home_name(one)): LinkView(
            True, remote.path.bps, remote.path.rtt_s, None, 0.0
        )
        for one in NETWORK.homes
        for remote in one.problem.remotes
    }
    costs = {home_name(one): build_costs(one.problem, 5000) for one in NETWORK.homes}
    made = Board(costs, [*NODES.items(), *remotes], links, slots={EAST: 4, WEST: 4})
    for name, plan in PLANS.items():
        for node in NODES[name]:
            made.assign(node, plan.roles[node], usable=True)
    return made


PLANS = first_plans(NETWORK, NODES, SchedulerSection().replan, "paper")


def routed(
    seen: Board, name: ClusterId, rules: SchedulerSection, *, now_s: float = 0.0
) -> HomeContext:
    round_trip_s = 0.0 if name == EAST else ROUND_TRIPS[EAST, WEST]
    view = seen.view(now_s, {}, {}, name)
    return HomeContext(view, PLANS[name], ShortTermState(rules), round_trip_s)
