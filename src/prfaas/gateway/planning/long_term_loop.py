"""The long-term loop of the live gateway: plans for the usable nodes, and changes their roles.

A gateway that plans writes roles to the kvds, each change on the epoch that the decision was based
on; other gateways read the roles there. A gateway that advises assigns roles to nodes without one
and only logs its other plans. A node that is to change its role is evacuated first; then it gets no
new requests until it has finished those it has. Paper: section 3.4.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.contracts.kvd_api import RoleName, SetRole
from prfaas.errors import PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.gateway.router import Router
from prfaas.http_client.client import HttpClient
from prfaas.planner.problem import Problem
from prfaas.scheduler.long_term.replan import replan
from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.scheduler.plan import (
    Plan,
    Role,
    hardware_for,
    plan_for_nodes,
    with_instances,
    with_paces,
)
from prfaas.supervision import one_line, repeat
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)

STEP_EVERY_S = 0.5


class LongTermLoop:
    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        evacuations: Evacuations,
        deployment: Deployment,
        problem: Problem,
        http: HttpClient,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._evacuations = evacuations
        self._problem = hardware_for(deployment.scheduler.policy, problem)
        self._plans = deployment.gateway.plans
        self._rules = deployment.scheduler.replan
        self._http = http
        self._clock = clock
        self._started_s = clock.now()
        self._replanned_s = self._started_s  # when the traffic was last evaluated
        self._planned_for: object = None  # the nodes and roles at the latest plan
        self.history = PlanHistory(advises=deployment.gateway.advise)
        self.traffic = TrafficHistory(self._started_s, self._rules.window_s)

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

        await repeat(step, 0.0, self._fleet.failures, loop="long_term", retry_s=STEP_EVERY_S)

    async def _step(self) -> None:
        local = self._usable(self._fleet.local)
        counted = [ClusterId(remote.pool.cluster) for remote in self._problem.remotes]
        remotes = tuple(len(self._planned(cluster)) for cluster in counted)
        if local and self._may_plan():
            plan = await self._next_plan(self._planned(self._fleet.local), remotes)
            if plan is not None:
                self._router.follow(plan)
                self.history.record_plan(plan)
        converted: list[NodeId] = []
        if self._router.plan is not None:
            # All at once, so that a kvd that answers late does not delay the other nodes' roles.
            tries = (self._try_role(node, self._router.plan) for node in local)
            converted = [node for node in await asyncio.gather(*tries) if node is not None]
        self._fleet.refresh()
        # After the refresh, so that no reader sees a completed change beside the former role.
        for node in converted:
            role = self._fleet.roles.of(node)
            if role is not None:
                self.history.record_conversion(node, role, self._clock.now())

    def _usable(self, cluster: ClusterId) -> list[NodeId]:
        return self._fleet.members.usable_nodes(cluster, self._clock.now())

    def _planned(self, cluster: ClusterId) -> list[NodeId]:
        """The nodes that a plan counts on: those in use, and those that have left on purpose. A
        restart is no reason to drain another node, and the node keeps its role for its return."""
        used = self._usable(cluster)
        expected = self._fleet.members.expected_nodes(cluster, self._clock.now())
        if cluster == self._fleet.local:
            expected = [node for node in expected if self._fleet.roles.of(node) is not None]
        return [*used, *(node for node in expected if node not in used)]

    def _may_plan(self) -> bool:
        """The first plan does not come with the first node that answers: the other nodes of the
        deployment file are given `first_plan_s`."""
        deadline_s = self._started_s + self._fleet.timeouts.first_plan_s
        if self._router.plan is not None or self._clock.now() > deadline_s:
            return True
        now = self._clock.now()
        return all(member.is_alive(now) for member in self._fleet.members if member.listed)

    async def _next_plan(self, local: list[NodeId], remotes: tuple[int, ...]) -> Plan | None:
        """A new plan, where there is a reason for one. A thread solves it."""
        now = self._clock.now()
        plan = self._router.plan
        roles = self._known_roles(local)
        planned_for = (remotes, tuple(sorted(roles.items(), key=str)))
        changed, self._planned_for = planned_for != self._planned_for, planned_for
        newcomers = plan is None or any(node not in plan.roles for node in local)
        if newcomers or (changed and not self._plans):
            base = self._problem
            if plan is not None:
                base = replace(base, workload=plan.problem.workload)
            base = with_paces(base, self._fleet.pace.factors)
            problem = with_instances(base, remotes, len(local))
            reason = "the deployment's stated traffic" if plan is None else "nodes came or went"
            new = await asyncio.to_thread(
                plan_for_nodes, problem, roles, self._rules, now, reason=reason
            )
            if plan is None:
                return new
            # Names of members that are gone for good would otherwise add up.
            kept = {n: r for n, r in plan.roles.items() if self._fleet.members.named(n)}
            return replace(new, roles={**kept, **new.roles}, converted_s=plan.converted_s)
        if not self._plans or not (changed or now >= self._replanned_s + self._rules.every_s):
            return None
        # The intervals count from the start, even when a step is late, or early after a change.
        self._replanned_s = now - (now - self._started_s) % self._rules.every_s
        assert plan is not None
        window = self.traffic.window(now, remotes, set(local), self._fleet.pace.factors)
        better = await asyncio.to_thread(replan, window, plan)
        if not self.history.advises:
            return better
        self.history.record_advice(better)
        return None

    def _known_roles(self, local: list[NodeId]) -> Mapping[NodeId, Role | None]:
        """The roles that the kvds have recorded, from before a restart of the gateway or from the
        gateway that plans. The plan of a gateway that plans takes precedence: a restarted kvd has
        lost its role."""
        plan = self._router.plan
        known: dict[NodeId, Role | None] = {}
        for node in local:
            recorded = self._recorded(node)
            known[node] = None if recorded == "both" else recorded
            if plan is not None and (self._plans or known[node] is None):
                known[node] = plan.roles.get(node, known[node])
        return known

    def _recorded(self, node: NodeId) -> RoleName:
        member = self._fleet.members.named(node)
        return "both" if member is None or member.report is None else member.report.role.role

    async def _try_role(self, node: NodeId, plan: Plan) -> NodeId | None:
        """As `_apply_role`; a failure is recorded and does not reach the other nodes. Returns the
        node when it has completed a change of its role."""
        try:
            return node if await self._apply_role(node, plan) else None
        except Exception as error:
            self._fleet.failures.record("long_term", error)
            return None

    async def _apply_role(self, node: NodeId, plan: Plan) -> bool:
        """One step towards the node's role in the plan. Returns whether the node has changed its
        role with this step."""
        fleet = self._fleet
        wanted = plan.roles.get(node)
        current = fleet.roles.of(node)
        member = fleet.members.named(node)
        if wanted is None or member is None or member.report is None:
            return False
        if not self._plans:
            fleet.assign_role(node, wanted)
            return False
        if current is not None and current != wanted:
            if not fleet.roles.is_draining(node) and not self._evacuations.evacuate(node):
                return False  # in use until its hot prefixes are copied
            fleet.drain(node)
            view = fleet.board.node(node)
            if view.queued or view.active:
                return False
        recorded = member.report.role
        if recorded.role != wanted and not await self._write_role(
            member, SetRole(wanted, recorded.epoch)
        ):
            return False
        fleet.assign_role(node, wanted)
        self._evacuations.reset(node)
        return current is not None and current != wanted

    async def _write_role(self, member: Member, role: SetRole) -> bool:
        """Returns whether the kvd has recorded the role; if not, the next step retries."""
        kvd = KvdClient(self._http, member.kvd_url, self._fleet.timeouts)
        try:
            written = await kvd.set_role(role)
            if written is None:
                log.warning("%s: another gateway has changed the role", member.kvd_url)
            self._fleet.record_report(member, await kvd.stats())
        except PeerError as error:
            log.warning("cannot change the role of %s: %s", member.kvd_url, one_line(str(error)))
            return False
        return written is not None
