"""The fleet: members, their roles and work, the links between clusters. It decides nothing.

Everything here is synchronous, so that a routing decision sees one consistent state. The poller and
the dispatcher record what they observe, the long-term loop assigns roles, the router reads the
board. Other parts change the fleet through its methods only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from prfaas.cache.manager import GlobalKVManager
from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.contracts.kvd_api import KvdReport
from prfaas.errors import MalformedResponse, PeerError, Refused, Unreachable
from prfaas.gateway.client.node_client import Card, Load
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.cached_prefixes import CachedPrefixes, Pool, pools_of
from prfaas.gateway.fleet.formats import sets_of
from prfaas.gateway.fleet.gateway_work import GatewayWork
from prfaas.gateway.fleet.links.monitor import LinkMonitor
from prfaas.gateway.fleet.links.reports import LinkReports
from prfaas.gateway.fleet.liveness import Liveness
from prfaas.gateway.fleet.member import Member, Part, member_fields
from prfaas.gateway.fleet.membership import Membership
from prfaas.gateway.fleet.prefill_pace import PrefillPace
from prfaas.gateway.fleet.roles import Roles
from prfaas.lateness import LateSince, never_late
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.board import Board
from prfaas.scheduler.costs import build_costs
from prfaas.scheduler.homes.plans import as_network, home_name
from prfaas.scheduler.plan import Role
from prfaas.scheduler.request import Route
from prfaas.scheduler.view import LinkId, LinkView
from prfaas.service.logging import with_fields
from prfaas.supervision import Failures, one_line
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)

_LONGEST_LOOKUP = 262_144  # tokens; the times of longer prompts are computed


class Fleet:
    def __init__(
        self,
        deployment: Deployment,
        problem: Problem | NetworkProblem,
        clock: Clock,
        late_since: LateSince = never_late,
    ) -> None:
        """`late_since` returns how late this gateway was: members are not blamed for that."""
        network = as_network(problem)
        self.homes = [home_name(home) for home in network.homes]  # the PD clusters
        self.remotes = [ClusterId(cluster) for cluster in network.prfaas_pools]
        longest = min(deployment.model.max_tokens, _LONGEST_LOOKUP)
        costs = {home_name(home): build_costs(home.problem, longest) for home in network.homes}
        self.board = Board(
            costs,
            [(cluster, ()) for cluster in (*self.homes, *self.remotes)],
            _configured_links(deployment, self.homes),
            slots={home_name(home): home.problem.local.decode.bs_max for home in network.homes},
        )
        self.work = GatewayWork(self.board, clock)
        self.timeouts = deployment.gateway.timeouts
        self.failures = Failures(clock)
        self.members = Membership(deployment, late_since)
        self.roles = Roles()
        self.liveness = Liveness(self.members, clock)
        self.links = LinkMonitor(LinkReports(deployment), self.members, self.board, clock)
        self.pace = PrefillPace(costs, self.board, deployment.scheduler.correction, clock)
        self.manager = GlobalKVManager(network.homes[0].problem.spec)
        self.prefixes = CachedPrefixes(self.manager, self.board)
        # The nodes in use, by KV format: hand-offs and copies stay within one of these sets.
        self.sets: tuple[frozenset[NodeId], ...] = ()
        self.drained: frozenset[ClusterId] = frozenset()  # clusters that get no new requests
        # Set when a node came into use or went out of use; the long-term loop waits for it.
        self.changed = asyncio.Event()
        self._on_change: Callable[[], None] = lambda: None
        self._clock = clock

    def call_on_change(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called after a node has come into use or gone out of use."""
        self._on_change = on_change

    # Members --------------------------------------------------------------------------------------

    def register(self, kvd_url: str, cluster: ClusterId) -> Member | None:
        """Adds a member. Returns None when the kvd is a member already."""
        return self.members.register(kvd_url, cluster, self._clock.now())

    def remove(self, member: Member) -> None:
        """Removes a member that is not expected back."""
        self.members.remove(member)
        self.refresh()

    def record_report(self, member: Member, report: KvdReport) -> None:
        """Records a kvd's report. A kvd that reports for the first time joins the board."""
        before, formats_before = member.compat, member.compats
        joined = self.members.record_report(member, report, self._clock.now())
        if joined:
            log.info(
                "%s of %s joined at %s",
                report.node,
                member.cluster,
                member.kvd_url,
                extra=member_fields("joined", member, report.node),
            )
            self.pace.restart(report.node)
            if report.node in self.board:
                self.board.forget_work(report.node)
            if before is not None and member.compat not in (None, before):
                member.card = None  # another engine has registered: it is not used until it answers
        if member.report is not report:
            return  # another member has its name
        if report.node not in self.board:
            self.board.join(member.cluster, report.node)
            self.work.add(report.node)
        is_new = joined or member.compats != formats_before
        self.refresh(because_of=None if is_new else member)

    def record_card(self, member: Member, card: Card) -> None:
        """Records that the engine answers for the first time, or again after a silence."""
        member.card = card
        if member.node is not None:
            self.pace.restart(member.node)

    def record_problem(self, member: Member, part: Part, error: Exception) -> None:
        """A poll of the member's kvd or engine has failed. An engine that does not answer loses its
        card: the next process at its address may serve another model. One that is refused has
        exited, so that its silence is no reason to wait for it. A kvd that sends something
        malformed is not used until it sends a good report; one that is silent has a while."""
        if part == "engine":
            member.card = None
            if isinstance(error, Refused):
                member.engine_failed_s = self._clock.now()
        else:
            member.kvd_unreachable = isinstance(error, Unreachable)
            if isinstance(error, MalformedResponse) or not isinstance(error, PeerError):
                member.kvd_failed_s = self._clock.now()
        member.problems[part] = one_line(str(error) or type(error).__name__)
        self.refresh()

    def record_load(
        self, member: Member, load: Load, *, leaving: bool, asked_s: float, own: int
    ) -> None:
        """Records an engine's load. `own` is `work.prefills_at` the node when it was
        polled."""
        was_alive = member.is_alive(self._clock.now())
        if leaving and not member.leaving:
            fields = member_fields("drains", member)
            log.info("the engine of %s is draining", member.kvd_url, extra=fields)
        member.leaving = leaving
        member.load = load
        member.problems.pop("engine", None)
        member.engine_seen_s = asked_s
        member.engine.hear(self._clock.now())
        node = member.node
        if node is not None and node in self.board:
            self.work.record_load(node, load, own, asked_s)
        self.refresh(because_of=member if was_alive else None)

    def record_engine_failure(self, node: NodeId, *, leaving: bool = False) -> bool:
        """A request could not connect to the engine, or was refused because the engine is
        `leaving`. The node is not used until it answers, or answers that it does not drain. Returns
        whether the node was taken for alive until now."""
        member = self.members.named(node)
        if member is None:
            return False
        was_alive = member.is_alive(self._clock.now())
        if leaving:
            member.leaving = True
        else:
            member.engine_failed_s = self._clock.now()
        self.refresh()
        return was_alive

    def record_kvd_failure(self, node: NodeId) -> bool:
        """A request could not connect to the kvd. The node is not used until it answers. Returns
        whether the node was taken for alive until now."""
        member = self.members.named(node)
        if member is None:
            return False
        was_alive = member.is_alive(self._clock.now())
        member.kvd_failed_s = self._clock.now()
        self.refresh()
        return was_alive

    def set_drained(self, clusters: frozenset[ClusterId]) -> None:
        """These clusters get no new requests, and all others do."""
        for cluster in clusters ^ self.drained:
            state = "drained" if cluster in clusters else "in use again"
            fields = with_fields(event="cluster", cluster=cluster, state=state)
            log.info("%s is %s", cluster, state, extra=fields)
        self.drained = clusters
        self.refresh()
        self.changed.set()

    # Roles and work -------------------------------------------------------------------------------

    def assign_role(self, node: NodeId, role: Role) -> None:
        """Assigns a role from the next `refresh` on, so that several nodes can change at once."""
        self.roles.assign(node, role)

    def drain(self, node: NodeId) -> None:
        """The node gets no new requests until it is assigned a role."""
        self.roles.drain(node)
        self.refresh()

    def book(
        self,
        route: Route,
        prompt_tokens: int,
        on_room: Callable[[], None],
        *,
        streams: bool = True,
        sequences: int = 1,
        tenant: str = "",
    ) -> Booking:
        costs = self.pace.costs[route.decode_cluster]
        kv_bytes = float(costs.handoff_bytes(prompt_tokens, prompt_tokens))
        now = self._clock.now()
        return Booking(
            self.board,
            self.work,
            route,
            kv_bytes,
            now,
            on_room,
            streams=streams,
            sequences=sequences,
            tenant=tenant,
        )

    # The state that decisions see -----------------------------------------------------------------

    def update(self) -> None:
        """Called twice a second: updates the board, link reports and the prefix index."""
        parts = (self.refresh, self.links.update, self.pace.update, self.manager.sweep)
        for part in parts:
            self.failures.contain("short_term", part)

    def refresh(self, because_of: Member | None = None) -> None:
        """Brings the board in line with liveness, roles and membership. This looks at all members,
        and each of them reports several times a second: with `because_of`, nothing is done unless
        the board differs from what is known of that member."""
        now = self._clock.now()
        if because_of is not None and not _has_changed(self, because_of, now):
            return
        changed = False
        used: list[Member] = []
        self.members.update_formats(now)
        for member in self.members:
            node = member.node
            if node is None or node not in self.board:
                continue
            role, usable = _use_of(self, member, node, now)
            if usable:
                used.append(member)
            before = self.board.node(node)
            if (before.role, before.usable) != (role, usable):
                self.board.assign(node, role, usable=usable)
                changed = True
                state = "in use" if usable else "not in use"
                fields = with_fields(
                    event="role" if role != before.role else "member",
                    change=state,
                    node=node,
                    cluster=member.cluster,
                    role=role,
                )
                log.info("%s: %s, %s", node, role, state, extra=fields)
        for node in self.work:
            if self.members.named(node) is None:
                self._remove_from_board(node)
        self.sets = sets_of(used)
        self.prefixes.use(used)
        if changed:
            self.changed.set()
            self._on_change()

    def _remove_from_board(self, node: NodeId) -> None:
        """No member has that name any more. The node stays on the board, unused, until the last
        booking there is closed."""
        if self.board.node(node).usable:
            self.board.assign(node, self.board.node(node).role, usable=False)
            self.changed.set()
        if not self.board.leave(node):
            return
        self.work.remove(node)
        self.pace.restart(node)
        self.roles.remove(node)
        self.prefixes.remove(node)

    def pools(self) -> list[Pool]:
        """The pools of nodes whose kvd answers, whatever their engines do: prefixes can be copied
        from there."""
        now = self._clock.now()
        return [
            pool
            for m in self.members
            if m.node is not None and m.node in self.board and m.is_kvd_alive(now)
            for pool in pools_of(m)
            if self.members.formats.has_indexed_blocks(m, pool.compat)
        ]

    def prefill_waits_s(self) -> dict[NodeId, float | None]:
        """How long a prefill would wait at each node in use; None: the node does not prefill."""
        now_s = self._clock.now()
        return {
            node.node: max(0.0, node.free_at_s - now_s) if node.role == "prefill" else None
            for cluster in (*self.homes, *self.remotes)
            for node in self.board.cluster(cluster).nodes
            if node.usable
        }

    def has_free_decode_node(self, home: ClusterId, full: Collection[NodeId]) -> bool:
        """Whether a decode node of a PD cluster is in use that is not one of the `full` ones."""
        nodes = self.board.cluster(home).nodes
        return any(n.usable and n.role == "decode" and n.node not in full for n in nodes)


def _use_of(fleet: Fleet, member: Member, node: NodeId, now_s: float) -> tuple[Role, bool]:
    """The role of a node on the board, and whether it gets requests."""
    role = fleet.roles.of(node) if member.cluster in fleet.homes else "prefill"
    usable = (
        role is not None
        and member.cluster not in fleet.drained
        and not fleet.roles.is_draining(node)
        and fleet.members.is_usable(member, now_s)
    )
    return role or fleet.board.node(node).role, usable


def _has_changed(fleet: Fleet, member: Member, now_s: float) -> bool:
    """Whether the board differs from what is known of the member."""
    node = member.node
    if node is None or node not in fleet.board:
        return True
    seen = fleet.board.node(node)
    return (seen.role, seen.usable) != _use_of(fleet, member, node, now_s)


def _configured_links(
    deployment: Deployment, homes: Collection[ClusterId]
) -> Mapping[LinkId, LinkView]:
    """The links over which requests are handed off. No KV travels between two PD clusters, except
    when one of them is drained."""
    found = {}
    for link in deployment.links:
        ends = ClusterId(link.source), ClusterId(link.target)
        if ends[0] != ends[1] and not (ends[0] in homes and ends[1] in homes):
            found[ends] = LinkView(True, link.gbps * 1e9, link.rtt_ms / 1e3, None, 0.0)
    return found
