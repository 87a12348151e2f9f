"""Owns what routing knows, and asks the scheduler: `route`, `adjust`, `explain`.

Everything in here is synchronous, so that a decision sees one world; only `place` waits, when the
scheduler says so. What happens to requests and nodes is told to it; it tells nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import PromptHashes
from prfaas.cache.index import NodeInfo, NodeMatch
from prfaas.cache.manager import GlobalKVManager, PromptMatch
from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.contracts.kvd_api import KvdReport, spec_of
from prfaas.errors import RequestError
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.decision_log import DecisionLog
from prfaas.gateway.dispatch.booking import Booking
from prfaas.gateway.fleet.link_reports import LinkReports
from prfaas.gateway.fleet.membership import HUNG_AFTER_S, Member, Membership
from prfaas.gateway.fleet.prefill_work import PrefillWork
from prfaas.gateway.short_term_log import ShortTermLog
from prfaas.planner.problem import Problem
from prfaas.scheduler.board import Board
from prfaas.scheduler.costs import build_costs
from prfaas.scheduler.explain import Explanation, explain
from prfaas.scheduler.long_term.profile_correction import ProfileCorrection
from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.scheduler.plan import Plan, Role
from prfaas.scheduler.request import Request, Route, local_only_reason
from prfaas.scheduler.short_term import adjust, has_room, route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import LinkId, LinkView, View, exclude_nodes
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)

MAX_HELD = 4096  # requests that wait here; more are told to come back
FULL_RETRY_S = 5.0
_LONGEST_LOOKUP = 262_144  # tokens; the times of longer prompts are computed
_UNPLANNED = Hold("no node decodes yet", None, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """A request that wants a place."""

    request: Request
    prompt: PromptHashes
    avoid: Collection[NodeId] = ()  # it has failed there, or was told to come back later
    booking: Booking | None = None
    placed: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    def __init__(
        self, deployment: Deployment, problem: Problem, clock: Clock, recorder: DecisionLog | None
    ) -> None:
        self.started_s = clock.now()
        self.members = Membership(deployment)
        self.local = ClusterId(problem.local.pool.cluster)
        self.remotes = [ClusterId(remote.pool.cluster) for remote in problem.remotes]
        longest = min(deployment.model.max_tokens, _LONGEST_LOOKUP)
        self.costs = build_costs(problem, longest)
        self.links = LinkReports(deployment)
        self.loop_log = ShortTermLog()
        self.state = ShortTermState(deployment.scheduler)
        self.plan: Plan | None = None  # until somebody can decode
        self.roles: dict[NodeId, Role] = {}  # of PD nodes, as they are; the plan is a wish
        self.draining: set[NodeId] = set()
        self.manager = GlobalKVManager(problem.spec)
        self.traffic = TrafficHistory(self.started_s, deployment.scheduler.replan.window_s)
        self.paces = ProfileCorrection(deployment.scheduler.correction)
        self.held: WaitingRoom[PlacementRequest] = WaitingRoom()
        self.changed = asyncio.Event()  # somebody came or went
        self._clock = clock
        self._recorder = recorder
        self._work: dict[NodeId, PrefillWork] = {}
        self._engines: dict[NodeId, NodeId] = {}  # whose events have a name of their own -> node
        self._cut_s: dict[LinkId, float] = {}  # links that are down, since when
        # By node, and by whether the answer streams: how whoever waits for it gives up.
        self._waiting_for: dict[tuple[NodeId, bool], set[Callable[[], None]]] = {}
        paths = {
            (ClusterId(link.source), ClusterId(link.target)): LinkView(
                True, link.gbps * 1e9, link.rtt_ms / 1e3, None, 0.0
            )
            for link in deployment.links
            if link.source != link.target
        }
        self.board = Board(
            self.costs,
            [(self.local, ()), *((remote, ()) for remote in self.remotes)],
            paths,
            slots=problem.local.decode.bs_max,
        )

    # Requests -------------------------------------------------------------------------------------

    async def place(self, seeker: PlacementRequest, patience_s: float) -> Booking:
        """Where it goes now, or as soon as there is room. Raises `RequestError`."""
        hold = self._refused(seeker)
        if hold is not None:
            await self._wait(seeker, hold, patience_s)
        assert seeker.booking is not None
        return seeker.booking

    async def _wait(self, seeker: PlacementRequest, hold: Hold, patience_s: float) -> None:
        if len(self.held) >= MAX_HELD:
            raise RequestError(
                429,
                "overloaded",
                f"{len(self.held)} requests are waiting already",
                retry_after_s=FULL_RETRY_S,
            )
        self.held.put(seeker, hold)
        try:
            if hold.cluster is not None and has_room(hold.cluster, self._view({}), self.state):
                # It waits because others are before it: the free node is given to them now.
                self.ask_again()
            async with asyncio.timeout(patience_s):
                await seeker.placed.wait()
        except BaseException as error:
            # It may have been placed in the very moment in which it gave up.
            if not self.held.remove(seeker) and seeker.booking is not None:
                seeker.booking.close(self._clock.now())
            if isinstance(error, TimeoutError):
                message = f"nobody could take it within {patience_s:.0f} s: {hold.reason}"
                raise RequestError(503, "overloaded", message, retry_after_s=FULL_RETRY_S) from None
            raise

    def ask_again(self) -> None:
        """Retries the requests that wait, as far as there is room."""
        self.held.retry(
            self._refused,
            lambda cluster: has_room(cluster, self._view({}), self.state),
            lambda seeker: seeker.placed.set(),
        )

    def _refused(self, seeker: PlacementRequest) -> Hold | None:
        """Routes and books a request, unless it is to wait."""
        if self.plan is None:
            return _UNPLANNED._replace(precedence=seeker.request.arrived_s)
        now = self._clock.now()
        request = seeker.request
        match = self.manager.match(seeker.prompt)
        view = self._view(self._cached(match))
        seen = exclude_nodes(view, seeker.avoid)
        way = route(request, seen, self.plan, self.state)
        if isinstance(way, Hold) and way.cluster is None and seeker.avoid:
            # To avoid somebody is a preference: those who do not answer are not usable anyway.
            seen = view
            way = route(request, seen, self.plan, self.state)
        if self._recorder is not None:
            self._recorder.write(request, seen, self.plan, self.state, way)
        if isinstance(way, Hold):
            return way
        stays = local_only_reason(request)
        if request.prompt_tokens == 1 or stays:
            # Nothing to hand off, or nothing that may be: the decode node does it all.
            way = way._replace(
                reason=stays or way.reason,
                cluster=self.local,
                prefill=way.decode,
                offloaded=False,
                transfer_tokens=0,
                nbytes=0,
                copies=(),
            )
        self.manager.observe(seeker.prompt, match, now)
        kv_bytes = float(self.costs.handoff_bytes(request.prompt_tokens, request.prompt_tokens))
        seeker.booking = Booking(
            self.board, self._work[way.prefill], way, kv_bytes, now, self._prefill_ended
        )
        return None

    def explain(self, request: Request, prompt: PromptHashes) -> Explanation | None:
        if self.plan is None:
            return None
        view = self._view(self._cached(self.manager.match(prompt)))
        return explain(request, view, self.plan, self.state)

    def prefill_answered(self, route: Route, tokens: int, cached: int, sent_s: float) -> float:
        """The node has computed what it was sent, `tokens` of which `cached` were there already.
        When it began with it."""
        now = self._clock.now()
        before = self.paces.factors
        stated_s = self.costs.stated_s[route.cluster](tokens - cached, cached)
        took_s = self.paces.record_prefill(route.cluster, route.prefill, stated_s, sent_s, now)
        if self.paces.factors is not before:
            self.costs = self.costs.paced(self.paces.factors)
            self.board.set_costs(self.costs)
            factor = self.paces.factors[route.cluster]
            log.info("%s: prefills take %.2f times what its profile says", route.cluster, factor)
        return now - took_s

    def _prefill_ended(self) -> None:
        if self.held:
            self.ask_again()

    def _view(self, cached: Mapping[NodeId, NodeMatch]) -> View:
        return self.board.view(self._clock.now(), cached, self.held.work)

    def _cached(self, match: PromptMatch) -> Mapping[NodeId, NodeMatch]:
        """What each node holds: its kvd's pool and, beside it, its engine's own cache, which saves
        compute, but no bytes of a hand-off."""
        found = dict(match.nodes)
        for engine, node in self._engines.items():
            own = found.pop(engine, None)
            if own is not None:
                pool = found.get(node, NodeMatch(0, 0))
                found[node] = NodeMatch(max(pool.tokens, own.tokens), pool.attention_tokens)
        return found

    # Nodes ----------------------------------------------------------------------------------------

    def heard(self, member: Member, report: KvdReport) -> None:
        """A kvd's report."""
        if self.members.heard(member, report, self._clock.now()):
            log.info("%s of %s at %s is here", report.node, member.cluster, member.kvd_url)
            self.paces.reset_node(report.node)
            if report.node in self.board:
                self.board.forget_work(report.node)
        if member.report is not report:
            return  # another one has its name
        if report.node not in self.board:
            self.board.join(member.cluster, report.node)
            self._work[report.node] = PrefillWork()
        self.refresh()

    def loaded(self, member: Member, load: Load, asked_s: float, own: int) -> None:
        """An engine's word; `own`: of our prefills, those that were there when it was asked."""
        member.load = load
        member.engine_heard_s = asked_s
        node = member.node
        if node is not None and node in self.board:
            work, view = self._work[node], self.board.node(node)
            own_decodes = self.board.own_decodes(node)
            report = work.report(load, view.role, max(own, len(work)), own_decodes, asked_s)
            self.board.record_report(node, report)
        self.refresh()

    def engine_came(self, member: Member) -> None:
        """One that has not answered before, or not for a while."""
        if member.node is not None:
            self.paces.reset_node(member.node)

    def own_prefills(self, member: Member) -> int:
        node = member.node
        return len(self._work[node]) if node in self._work else 0

    def indexed(self, member: Member, name: NodeId) -> bool:
        """Makes room in the index for events under `name`, of the pool or of an engine of this
        member: it holds nothing until it says so. False: it is too early for that."""
        report = member.report
        if report is None or report.pool is None or report.node not in self.board:
            return False
        rules = rules_for(spec_of(report.pool.groups))
        self.manager.join(NodeInfo(name, member.cluster, report.pool.block_tokens, rules))
        if name != report.node:
            self._engines[name] = report.node
        return True

    def refresh(self) -> None:
        """The board follows who is alive and which work is whose."""
        now = self._clock.now()
        changed = False
        for member in self.members:
            node = member.node
            if node is None or node not in self.board:
                continue
            role = self.roles.get(node) if member.cluster == self.local else "prefill"
            usable = role is not None and node not in self.draining and self.fit(member, now)
            before = self.board.node(node)
            role = role or before.role
            if (before.role, before.usable) != (role, usable):
                self.board.assign(node, role, usable=usable)
                changed = True
                log.info("%s: %s, %s", node, role, "in use" if usable else "not in use")
        for node in list(self._work):
            if self.members.named(node) is None:
                self._depart(node)
        if changed:
            self.changed.set()
            self.ask_again()

    def fit(self, member: Member, now_s: float) -> bool:
        """Alive, and its state is of use to the others."""
        return member.alive(now_s) and not self.members.differences(member)

    def pools(self) -> list[NodeId]:
        """Nodes whose kvd answers, whatever their engines do: prefixes can be copied from there."""
        now = self._clock.now()
        return [
            m.node
            for m in self.members
            if m.node is not None
            and m.node in self.board
            and m.kvd_alive(now)
            and not self.members.differences(m)
        ]

    def waits_s(self) -> dict[NodeId, float | None]:
        """Nodes in use, and how long a prefill would wait there; None: it does none."""
        view = self._view({})
        return {
            node.node: max(0.0, node.free_at_s - view.now_s) if node.role == "prefill" else None
            for cluster in (view.local, *view.remotes)
            for node in cluster.nodes
            if node.usable
        }

    def way(self, source: Member, target: Member) -> str | None:
        """Through which relay the one's kvd reaches the other's; None: there is none between."""
        if source.cluster == target.cluster:
            return None
        return target.via or self.links.via((source.cluster, target.cluster))

    def live(self, cluster: ClusterId) -> list[NodeId]:
        now = self._clock.now()
        return [
            m.node
            for m in self.members
            if m.cluster == cluster and m.node is not None and self.fit(m, now)
        ]

    def remote_nodes(self) -> list[NodeId]:
        return [m.node for m in self.members if m.cluster != self.local and m.node is not None]

    def decodes_elsewhere(self, full: Collection[NodeId]) -> bool:
        nodes = self._view({}).local.nodes
        return any(n.usable and n.role == "decode" and n.node not in full for n in nodes)

    def block_sizes(self) -> set[int]:
        """At which prompts are hashed."""
        return {member.compat.block_tokens for member in self.members if member.compat}

    def engine_failed(self, node: NodeId) -> None:
        """A request found nobody there: none is sent until it answers again."""
        member = self.members.named(node)
        if member is not None:
            member.engine_failed_s = self._clock.now()
            self.refresh()

    def kvd_failed(self, node: NodeId) -> None:
        member = self.members.named(node)
        if member is not None:
            member.kvd_failed_s = self._clock.now()
            self.refresh()

    def hung(self, node: NodeId, *, engine_alone: bool = False) -> bool:
        member = self.members.named(node)
        return member is None or member.hung(self._clock.now(), engine_alone=engine_alone)

    @contextmanager
    def unless_silent(
        self, node: NodeId, give_up: Callable[[], None], *, begun: bool
    ) -> Iterator[None]:
        """`give_up` is called once, when the node has hung; of an answer that has `begun`, when its
        engine has."""
        key = (node, begun)
        self._waiting_for.setdefault(key, set()).add(give_up)
        try:
            yield
        finally:
            self._waiting_for.get(key, set()).discard(give_up)

    def forget(self, member: Member) -> None:
        """It is not expected back."""
        self.members.drop(member)
        self.refresh()

    def _depart(self, node: NodeId) -> None:
        """Nobody has that name any more. It leaves the board when nothing of ours is there."""
        if self.board.node(node).usable:
            self.board.assign(node, self.board.node(node).role, usable=False)
            self.changed.set()
        if not self.board.leave(node):
            return
        del self._work[node]
        self.paces.reset_node(node)
        self.roles.pop(node, None)
        self.draining.discard(node)
        self.manager.leave(node)
        for engine in [e for e, at in self._engines.items() if at == node]:
            self.manager.leave(engine)
            del self._engines[engine]

    # The short-term loop --------------------------------------------------------------------------

    def tick(self) -> None:
        """Twice a second: what reports have brought, and who has fallen silent."""
        now = self._clock.now()
        self.refresh()
        for key in [key for key, waiting in self._waiting_for.items() if waiting]:
            node, begun = key
            if self.hung(node, engine_alone=begun):
                waiting = self._waiting_for.pop(key)
                log.warning("%s: silent for %g s, given up by %d", node, HUNG_AFTER_S, len(waiting))
                for give_up in waiting:
                    give_up()
        members = list(self.members)
        for link_id, stats in self.links.new(members, now).items():
            self.board.record_link_report(link_id, stats)
            if self.board.is_up(link_id):
                if self._cut_s.pop(link_id, None) is not None:
                    log.info("link %s -> %s is back", *link_id)
            elif link_id not in self._cut_s:
                log.warning("link %s -> %s is cut", *link_id)
                self._cut_s[link_id] = now
        self.state = adjust(self.state, self._view({}), now)
        self.loop_log.tell(self.state)
        self.manager.sweep()
        if self.held:
            self.ask_again()

    def cut_for_s(self, link_id: LinkId) -> float:
        """How long nothing has passed there; 0 when something does."""
        since_s = self._cut_s.get(link_id)
        return 0.0 if since_s is None else self._clock.now() - since_s
