"""The long-term loop, live: plans for the nodes that are there, and brings their roles about.

A gateway that plans writes roles to the kvds, each change on the epoch it was decided on; others
read them there. One that advises gives roles to nodes that have none, and only says the rest. A
node that is to change its role lets its hot prefixes go elsewhere first; then it gets no new work
until it has finished what it has. Paper: section 3.4.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.contracts.kvd_api import Role as Recorded
from prfaas.errors import PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.fleet.membership import Member
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.gateway.router import Router
from prfaas.http_client.client import HttpClient
from prfaas.planner.problem import Problem
from prfaas.scheduler.long_term.replan import replan
from prfaas.scheduler.plan import (
    Plan,
    Role,
    hardware_for,
    plan_for_nodes,
    with_instances,
    with_paces,
)
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
START_S = 5.0  # a first plan waits so long for the nodes of the deployment file


class LongTermLoop:
    def __init__(
        self,
        router: Router,
        evacuations: Evacuations,
        deployment: Deployment,
        problem: Problem,
        calls: HttpClient,
        clock: Clock,
    ) -> None:
        self._router = router
        self._evacuations = evacuations
        self._problem = hardware_for(deployment.scheduler.policy, problem)
        self._plans = deployment.gateway.plans
        self.book = PlanHistory(advises=deployment.gateway.advise)
        self._rules = deployment.scheduler.replan
        self._calls = calls
        self._clock = clock
        self._started_s = clock.now()
        self._looked_s = self._started_s  # at the traffic
        self._seen: object = None  # who lived at the last plan

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._router.changed.clear()
            await self._look()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._router.changed.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        local = self._router.live(self._router.local)
        counted = [ClusterId(remote.pool.cluster) for remote in self._problem.remotes]
        remotes = tuple(len(self._router.live(cluster)) for cluster in counted)
        if local and self._may_begin():
            plan = await self._next(local, remotes)
            if plan is not None:
                self._router.plan = plan
                self.book.followed(plan)
        if self._router.plan is not None:
            for node in local:
                await self._bring_about(node, self._router.plan)
        self._router.refresh()

    def _may_begin(self) -> bool:
        """Not with the first node that answers: the others of the file are given a moment."""
        if self._router.plan is not None or self._clock.now() > self._started_s + START_S:
            return True
        now = self._clock.now()
        return all(member.alive(now) for member in self._router.members if member.listed)

    async def _next(self, local: list[NodeId], remotes: tuple[int, ...]) -> Plan | None:
        """A new plan, where there is reason for one. Solving takes a thread's time."""
        now = self._clock.now()
        plan = self._router.plan
        roles = self._known_roles(local)
        who = (remotes, tuple(sorted(roles.items(), key=str)))
        changed, self._seen = who != self._seen, who
        newcomers = plan is None or any(node not in plan.roles for node in local)
        if newcomers or (changed and not self._plans):
            base = self._problem
            if plan is not None:
                base = replace(base, workload=plan.problem.workload)
            base = with_paces(base, self._router.paces.factors)
            problem = with_instances(base, remotes, len(local))
            reason = "the deployment's stated traffic" if plan is None else "nodes came or went"
            new = await asyncio.to_thread(
                plan_for_nodes, problem, roles, self._rules, now, reason=reason
            )
            if plan is None:
                return new
            return replace(new, roles={**plan.roles, **new.roles}, converted_s=plan.converted_s)
        if not self._plans or not (changed or now >= self._looked_s + self._rules.every_s):
            return None
        # In step with the start, however late a look comes, or early because of who came or went.
        self._looked_s = now - (now - self._started_s) % self._rules.every_s
        assert plan is not None
        paces = self._router.paces.factors
        window = self._router.traffic.window(now, remotes, set(local), paces)
        better = await asyncio.to_thread(replan, window, plan)
        if not self.book.advises:
            return better
        self.book.advised(better)
        return None

    def _known_roles(self, local: list[NodeId]) -> Mapping[NodeId, Role | None]:
        """As the kvds have them: after a restart of the gateway, or from whoever plans. A planner's
        own plan comes first: a restarted kvd has forgotten."""
        plan = self._router.plan
        known: dict[NodeId, Role | None] = {}
        for node in local:
            recorded = self._recorded(node).role
            known[node] = None if recorded == "both" else recorded
            if plan is not None and (self._plans or known[node] is None):
                known[node] = plan.roles.get(node, known[node])
        return known

    def _recorded(self, node: NodeId) -> Recorded:
        member = self._router.members.named(node)
        assert member is not None and member.report is not None
        return member.report.role

    async def _bring_about(self, node: NodeId, plan: Plan) -> None:
        router = self._router
        wanted = plan.roles[node]
        current = router.roles.get(node)
        member = router.members.named(node)
        if member is None or member.report is None:
            return
        if not self._plans:
            router.roles[node] = wanted
            return
        if current is not None and current != wanted:
            if node not in router.draining and not self._evacuations.over(node):
                return  # in use until its hot prefixes are elsewhere
            router.draining.add(node)
            router.refresh()
            view = router.board.node(node)
            if view.queued or view.active:
                return
        recorded = member.report.role
        if recorded.role != wanted and not await self._write(
            member, Recorded(wanted, recorded.epoch)
        ):
            return
        if current is not None and current != wanted:
            self.book.converted(node, wanted, self._clock.now())
        router.roles[node] = wanted
        router.draining.discard(node)
        self._evacuations.forget(node)

    async def _write(self, member: Member, role: Recorded) -> bool:
        """Whether it is this plan's role now; if not, the next look sees why."""
        kvd = KvdClient(self._calls, member.kvd_url)
        try:
            written = await kvd.set_role(role)
            if written is None:
                log.warning("%s: another gateway plans, too", member.kvd_url)
            self._router.heard(member, await kvd.stats())
        except PeerError as error:
            log.warning("%s keeps its role: %s", member.kvd_url, error)
            return False
        return written is not None
