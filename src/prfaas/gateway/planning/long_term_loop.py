"""The long-term loop of the live gateway: plans for the usable nodes of all PD clusters.

`RoleChanges` gives nodes the roles of the plans. A gateway that advises assigns roles to nodes
without one and only logs its other plans. Of several gateways one plans, and the others follow its
plans (`Coordination`). Paper: section 3.4.3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple, ParamSpec

from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.errors import InputError
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.planning.coordination import Coordination
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.gateway.planning.role_changes import RoleChanges
from prfaas.gateway.router import Router
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.homes.plans import as_network, home_name, plans_for_nodes
from prfaas.scheduler.long_term.replan_homes import replan_homes
from prfaas.scheduler.long_term.traffic import TrafficWindow
from prfaas.scheduler.plan import Plan, Role, hardware_for, with_instances, with_paces
from prfaas.supervision import repeat
from prfaas.types import ClusterId, NodeId

STEP_EVERY_S = 0.5
P = ParamSpec("P")


class _Live(NamedTuple):
    """The nodes that a plan counts on."""

    roles: Mapping[ClusterId, Mapping[NodeId, Role | None]]  # as known, of the PD clusters
    instances: Mapping[ClusterId, int]  # of all clusters

    @property
    def homes(self) -> tuple[ClusterId, ...]:
        return tuple(home for home, roles in self.roles.items() if roles)


class LongTermLoop:
    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        roles: RoleChanges,
        deployment: Deployment,
        problem: Problem | NetworkProblem,
        clock: Clock,
        coordination: Coordination,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._roles = roles
        self._policy = deployment.scheduler.policy
        self._problems = {
            home_name(home): hardware_for(self._policy, home.problem)
            for home in as_network(problem).homes
        }
        self._stated_shares = {home_name(h): h.share for h in as_network(problem).homes}
        self._rules = deployment.scheduler.replan
        self._clock = clock
        self._coordination = coordination
        self._started_s = clock.now()
        self._replanned_s = self._started_s  # when the traffic was last evaluated
        self._planned_for: _Live | None = None  # at the latest plan
        self._has_begun = False  # the nodes had time to answer
        # One thread for all plans. With several, each would keep the memory that a plan took, and
        # prompts that other threads hash would wait for a plan.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-planning")
        self.history = PlanHistory(advises=deployment.gateway.advise)

    @property
    def plans_here(self) -> bool:
        """Whether this gateway makes plans and assigns roles now."""
        return self._coordination.plans

    async def run(self) -> None:
        """Runs the long-term loop until cancelled."""

        async def step() -> None:
            self._fleet.changed.clear()
            await self._step()
            try:
                async with asyncio.timeout(STEP_EVERY_S):
                    await self._fleet.changed.wait()
            except TimeoutError:
                pass

        try:
            await repeat(step, 0.0, self._fleet.failures, loop="long_term", retry_s=STEP_EVERY_S)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _solve(
        self, solve: Callable[P, Mapping[ClusterId, Plan]], *args: P.args, **kwargs: P.kwargs
    ) -> Mapping[ClusterId, Plan]:
        call = partial(solve, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _step(self) -> None:
        newer = self._coordination.newer_plans()
        if newer:
            self._follow({home: p for home, p in newer.items() if not self._is_followed(home, p)})
            self._planned_for = None  # if this gateway plans next, it plans for what it sees then
        await self._plan()
        # All at once, so that a kvd that answers late does not delay the nodes of another cluster.
        plans = self._router.plans
        planned = [home for home in self._fleet.homes if home in plans]
        steps = [self._roles.apply(plans[home], self._usable(home)) for home in planned]
        converted = [node for nodes in await asyncio.gather(*steps) for node in nodes]
        self._share()
        self._fleet.refresh()
        # After the refresh, so that no reader sees a completed change beside the former role.
        for node in converted:
            role = self._fleet.roles.of(node)
            if role is not None:
                self.history.record_conversion(node, role, self._clock.now())

    async def _plan(self) -> None:
        """Makes and follows new plans, where there is a reason for them."""
        coordination, term = self._coordination, self._coordination.term
        if not self._may_plan() or (coordination.follows and self._router.plans):
            return
        live = self._live()
        if not live.homes:
            return
        try:
            plans = await self._next_plans(live)
        except BaseException:
            self._planned_for = None  # what has changed is still a reason for a plan
            raise
        if coordination.term != term or (coordination.follows and self._router.plans):
            # Another gateway may plan since. If this one plans again, it starts from what it sees.
            self._planned_for = None
            return
        if plans:
            self._follow(plans)
            # At once: if this gateway loses its lease, the next one starts from what it followed.
            self._share()

    def _share(self) -> None:
        if self._coordination.plans and self._router.plans:
            self._coordination.share(self._router.plans, self._roles.draining)

    def _is_followed(self, home: ClusterId, plan: Plan) -> bool:
        known = self._router.plans.get(home)
        return known is not None and known.content == plan.content

    def _follow(self, plans: Mapping[ClusterId, Plan]) -> None:
        self._router.follow(plans)
        for home, plan in plans.items():
            self.history.record_plan(home, plan)

    def _usable(self, cluster: ClusterId) -> list[NodeId]:
        if cluster in self._fleet.drained:
            return []
        return self._fleet.members.usable_nodes(cluster, self._clock.now())

    def _planned(self, cluster: ClusterId) -> list[NodeId]:
        """The nodes that a plan counts on: those in use, and those that have left on purpose. A
        restart is no reason to drain another node, and the node keeps its role for its return."""
        used = self._usable(cluster)
        if cluster in self._fleet.drained:
            return used
        expected = self._fleet.members.expected_nodes(cluster, self._clock.now())
        if cluster in self._fleet.homes:
            if not used:
                return []  # no node of the cluster answers
            expected = [node for node in expected if self._fleet.roles.of(node) is not None]
        return [*used, *(node for node in expected if node not in used)]

    def _live(self) -> _Live:
        nodes = {home: self._planned(home) for home in self._fleet.homes}
        instances = {home: len(found) for home, found in nodes.items()}
        instances |= {remote: len(self._planned(remote)) for remote in self._fleet.remotes}
        return _Live(
            {home: self._known_roles(home, found) for home, found in nodes.items()}, instances
        )

    def _may_plan(self) -> bool:
        """The first plan does not come with the first node that answers: the other nodes of the
        deployment file, and the kvds that may keep a plan, are given `first_plan_s`. Afterwards a
        gateway also plans that should follow a plan and finds none."""
        if self._has_begun:
            return True
        now = self._clock.now()
        if now <= self._started_s + self._fleet.timeouts.first_plan_s:
            if self._coordination.follows or not self._coordination.is_informed:
                return False
            if not all(member.is_alive(now) for member in self._fleet.members if member.listed):
                return False
        self._has_begun = True
        return True

    async def _next_plans(self, live: _Live) -> Mapping[ClusterId, Plan]:
        """New plans, where there is a reason for them. A thread solves them."""
        now = self._clock.now()
        plans = {home: plan for home, plan in self._router.plans.items() if home in live.homes}
        before, self._planned_for = self._planned_for, live
        changed = live != before
        # Only after a change: where no plan exists for these nodes, none exists in the next step.
        newcomers = changed and any(
            home not in plans or any(node not in plans[home].roles for node in live.roles[home])
            for home in live.homes
        )
        # A PD cluster that was lost or has returned changes the flows of all others. The plan says
        # which were planned together, also where another gateway has made it.
        homes = set(live.homes)
        together = [plan.together for plan in plans.values() if plan.together]
        newcomers |= changed and any(set(planned) != homes for planned in together)
        if newcomers or (changed and not self._coordination.plans):
            return await self._plans_for_nodes(live, plans, now)
        due = now >= self._replanned_s + self._rules.every_s
        if not self._coordination.plans or not (changed or due):
            return {}
        # The intervals count from the start, even when a step is late, or early after a change.
        self._replanned_s = now - (now - self._started_s) % self._rules.every_s
        windows = self._windows(live, now)
        better = await self._solve(replan_homes, windows, plans, self._stated_shares)
        if not self.history.advises:
            return better
        self.history.record_advice(better)
        return {}

    def _windows(self, live: _Live, now_s: float) -> dict[ClusterId, TrafficWindow]:
        paces = self._fleet.pace.factors
        return {
            home: self._coordination.window(
                home, now_s, self._remotes_of(home, live), set(live.roles[home]), paces
            )
            for home in live.homes
        }

    def _remotes_of(self, home: ClusterId, live: _Live) -> tuple[int, ...]:
        remotes = self._problems[home].remotes
        return tuple(live.instances[ClusterId(remote.pool.cluster)] for remote in remotes)

    async def _plans_for_nodes(
        self, live: _Live, plans: Mapping[ClusterId, Plan], now_s: float
    ) -> Mapping[ClusterId, Plan]:
        """Plans for these nodes and the traffic that was planned for. Nodes keep their roles."""
        homes = []
        for home in live.homes:
            problem = self._problems[home]
            if home in plans:
                problem = replace(problem, workload=plans[home].problem.workload)
            problem = with_paces(problem, self._fleet.pace.factors)
            problem = with_instances(problem, self._remotes_of(home, live), live.instances[home])
            homes.append((self._stated_shares[home], problem))
        total = sum(share for share, _ in homes)
        network = NetworkProblem(tuple(Home(share / total, problem) for share, problem in homes))
        given = {home: live.roles[home] for home in live.homes}
        free = {home: dict.fromkeys(roles) for home, roles in given.items()}
        reason = "nodes came or went" if plans else "the deployment's stated traffic"
        # With the roles that the nodes have, those that are left may not be able to serve at all.
        for roles in (given, free):
            try:
                made = await self._solve(
                    plans_for_nodes,
                    network,
                    roles,
                    self._rules,
                    now_s,
                    reason=reason,
                    policy=self._policy,
                )
            except InputError as error:
                problem_text = str(error)
            else:
                together = tuple(sorted(live.homes)) if len(self._problems) > 1 else ()
                return {
                    home: replace(self._with_known(home, plan), together=together)
                    for home, plan in made.items()
                }
        self.history.record_no_plan(problem_text)
        return {}

    def _with_known(self, home: ClusterId, plan: Plan) -> Plan:
        """The plan with the roles of nodes that are away, for their return."""
        before = self._router.plans.get(home)
        if before is None:
            return plan
        # Names of members that are gone for good would otherwise add up.
        kept = {n: r for n, r in before.roles.items() if self._fleet.members.named(n)}
        return replace(plan, roles={**kept, **plan.roles}, converted_s=before.converted_s)

    def _known_roles(self, home: ClusterId, nodes: list[NodeId]) -> Mapping[NodeId, Role | None]:
        """The roles that the kvds have recorded, from before a restart of the gateway or from the
        gateway that plans. The plan of a gateway that plans takes precedence: a restarted kvd has
        lost its role."""
        plan = self._router.plans.get(home)
        known: dict[NodeId, Role | None] = {}
        for node in nodes:
            recorded = self._roles.recorded(node)
            known[node] = None if recorded == "both" else recorded
            if plan is not None and (self._coordination.plans or known[node] is None):
                known[node] = plan.roles.get(node, known[node])
        return known
