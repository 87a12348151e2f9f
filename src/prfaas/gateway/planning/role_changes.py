"""Gives nodes the roles of the plans, one step at a time.

A gateway that plans writes roles to the kvds, each change on the epoch that the decision was based
on; other gateways read the roles there. A node that is to change its role is evacuated first; then
it gets no new requests until it has finished those it has, of every gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from prfaas.contracts.kvd_api import RoleName, SetRole
from prfaas.errors import PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.planning.coordination import Coordination
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.http_client.client import HttpClient
from prfaas.scheduler.plan import Plan
from prfaas.supervision import one_line
from prfaas.types import NodeId

log = logging.getLogger(__name__)

STEPS_TO_WAIT = 8  # steps of the long-term loop


class RoleChanges:
    def __init__(
        self,
        fleet: Fleet,
        evacuations: Evacuations,
        http: HttpClient,
        coordination: Coordination,
    ) -> None:
        self._fleet = fleet
        self._evacuations = evacuations
        self._http = http
        self._coordination = coordination
        self._draining: set[NodeId] = set()  # nodes that this gateway is about to change
        self._waited: dict[NodeId, int] = {}  # steps, for the new role of a node that has drained

    @property
    def draining(self) -> frozenset[NodeId]:
        """Nodes that get no new requests from any gateway."""
        self._draining = {n for n in self._draining if self._fleet.members.named(n) is not None}
        return frozenset(self._draining)

    async def apply(self, plan: Plan, nodes: Iterable[NodeId]) -> list[NodeId]:
        """One step towards the roles of a plan. Returns the nodes that have completed a change. All
        at once, so that a kvd that answers late does not delay the other nodes' roles."""
        tries = (self._try_role(node, plan) for node in nodes)
        return [node for node in await asyncio.gather(*tries) if node is not None]

    def recorded(self, node: NodeId) -> RoleName:
        """The role that the node's kvd has recorded; `both`: none."""
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
        if not self._coordination.plans:
            self._draining.discard(node)
            self._follow_role(node, plan)
            return False
        if current is not None and current != wanted:
            if not fleet.roles.is_draining(node) and not self._evacuations.evacuate(node):
                return False  # in use until its hot prefixes are copied
            fleet.drain(node)
            self._draining.add(node)
            view = fleet.board.node(node)
            if view.queued or view.active or not self._coordination.has_left(node):
                return False
        recorded = member.report.role
        if recorded.role != wanted and not await self._write_role(
            member, SetRole(wanted, recorded.epoch, self._coordination.epoch)
        ):
            return False
        fleet.assign_role(node, wanted)
        self._draining.discard(node)
        self._evacuations.reset(node)
        return current is not None and current != wanted

    def _follow_role(self, node: NodeId, plan: Plan) -> None:
        """Another gateway changes roles. The kvd has recorded what the node is now."""
        fleet = self._fleet
        if node in self._coordination.draining():
            self._waited.pop(node, None)
            # In use until the prefixes are copied that are hot in this gateway's traffic.
            if not fleet.roles.is_draining(node) and self._evacuations.evacuate(node):
                fleet.drain(node)
            return
        self._evacuations.reset(node)
        recorded, wanted = self.recorded(node), plan.roles[node]
        if not self._coordination.follows or recorded == "both":
            fleet.assign_role(node, wanted)
        elif recorded == wanted or not fleet.roles.is_draining(node):
            fleet.assign_role(node, recorded)
        elif self._has_waited(node):
            # The change was given up: the gateway that made it has lost its lease.
            fleet.assign_role(node, recorded)

    def _has_waited(self, node: NodeId) -> bool:
        """Whether a node that has drained had time to show its new role: the next report of its kvd
        comes after `kvd_poll_s`."""
        steps = self._waited.get(node, 0) + 1
        self._waited[node] = steps
        if steps < STEPS_TO_WAIT:
            return False
        del self._waited[node]
        return True

    async def _write_role(self, member: Member, role: SetRole) -> bool:
        """Returns whether the kvd has recorded the role; if not, the next step retries."""
        kvd = KvdClient(self._http, member.kvd_url, self._fleet.timeouts)
        try:
            written = await kvd.set_role(role)
            if written is None:
                log.warning("%s refuses the role: another gateway has changed it", member.kvd_url)
            self._fleet.record_report(member, await kvd.stats())
        except PeerError as error:
            log.warning("cannot change the role of %s: %s", member.kvd_url, one_line(str(error)))
            return False
        return written is not None
