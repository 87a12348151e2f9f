"""Keeps the view up to date: this router's dispatches and what it saw of them, and the reports.

Bookkeeping only; gateway and simulator record the same events. A node's `free_at_s` follows from
what this router knows. It has dispatched the node's prefills and sees each of them end; a report
only adds what others have there:

    own prefill: 2 s, dispatched at 1 ──► free at 3
    another: 3 s, dispatched at 2     ──► free at 6
    the first is seen to end at 2     ──► free at 5       it took 1 s, and the second has begun
    a report: others have 4 s         ──► free at 9
    the second is seen to end at 4    ──► free at 8
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prfaas.contracts.slot_shares import held_slots
from prfaas.scheduler.costs import Costs
from prfaas.scheduler.homes.board_homes import BoardHomes
from prfaas.scheduler.lookup.prefixes import CachedPrefix, CachedPrefixes, group_prefixes
from prfaas.scheduler.plan import Role
from prfaas.scheduler.request import Route
from prfaas.scheduler.view import ClusterView, LinkId, LinkView, NodeView, View
from prfaas.scheduler.waiting import HeldWork
from prfaas.types import ClusterId, LinkStats, NodeId

_SAME_S = 1e-6  # smaller differences between reports are ignored


class NodeReport(NamedTuple):
    """One report of a node."""

    at_s: float
    others_s: float  # seconds of prefill work there that this router has not dispatched
    decoding: int  # sequences in its decode batch or waiting for a slot
    running: int | None = None  # of these, in the batch; None: it is not known


class OwnSequences(NamedTuple):
    """Sequences of this router's requests that a node decodes."""

    decoding: int  # whose KV is in place and that have not ended
    active: int  # these, and those whose KV is still to arrive


class Decoding(NamedTuple):
    """Sequences at a node whose KV is in place and that have not ended."""

    own: Mapping[str, int]  # of this router's requests, by tenant, whether they have a slot or not
    others: int  # of other routers, that have a slot


class OwnPrefills(NamedTuple):
    """Prefills of this router that a node has not finished."""

    prefills: int
    left_s: float


class Dispatch:
    """One attempt of one request, from its dispatch on. Only the board reads its fields."""

    __slots__ = ("at_s", "kv_bytes", "ready_s", "route", "sequences", "shows_prefill", "tenant")

    def __init__(
        self,
        route: Route,
        kv_bytes: float,
        at_s: float,
        *,
        shows_prefill: bool = True,
        sequences: int = 1,
        tenant: str = "",
    ) -> None:
        self.route = route
        self.sequences = sequences  # that it decodes: the choices of the answer
        self.tenant = tenant
        self.shows_prefill = shows_prefill  # whether the end of its prefill will be seen
        self.kv_bytes = kv_bytes  # of decode memory that are reserved for it
        self.at_s = at_s
        self.ready_s = at_s  # when the copies that its prefill needs are made
        if route.copies:
            self.ready_s += max(copy.seconds for copy in route.copies)


class _BoardNode:
    __slots__ = (
        "cluster",
        "decodes_of",
        "jobs",
        "jobs_s",
        "other_decodes",
        "other_running",
        "others_until_s",
        "own_decodes",
        "since_s",
        "unfinished",
        "view",
    )

    def __init__(self, view: NodeView, cluster: ClusterView) -> None:
        self.view = view
        self.cluster = cluster
        # Own prefills that are not known or taken to have ended, in the order of their dispatch,
        # and their seconds.
        self.jobs: dict[Dispatch, None] = {}
        self.jobs_s = 0.0
        # All own prefills that have not been seen to end.
        self.unfinished: dict[Dispatch, None] = {}
        self.since_s = -math.inf  # when the first job could begin
        self.others_until_s = -math.inf  # when the prefills of others will have ended
        # Own sequences whose KV is in place and that have not ended: all, and by tenant.
        self.own_decodes = 0
        self.decodes_of: dict[str, int] = {}
        self.other_decodes = 0  # sequences that the node decodes for other routers
        self.other_running = 0  # of these, those that have a slot

    def put(self, view: NodeView) -> None:
        self.view = view
        self.cluster.put(view)

    # Written out, because `_replace` takes three times as long and these run for every request.

    def set_work(self, free_at_s: float, more: int) -> None:
        node, role, usable, _, queued, active, slots, free, next_s, pace = self.view
        self.put(
            NodeView(
                node, role, usable, free_at_s, queued + more, active, slots, free, next_s, pace
            )
        )

    def reserve(self, more: int, kv_bytes: float) -> None:
        node, role, usable, free_at, queued, active, slots, free, next_s, pace = self.view
        left = free - kv_bytes
        self.put(
            NodeView(node, role, usable, free_at, queued, active + more, slots, left, next_s, pace)
        )

    def add_decodes(self, tenant: str, more: int) -> None:
        self.own_decodes += more
        left = self.decodes_of.get(tenant, 0) + more
        if left:
            self.decodes_of[tenant] = left
        else:
            self.decodes_of.pop(tenant, None)

    def add_job(self, job: Dispatch) -> None:
        self.unfinished[job] = None
        self.queue_job(job)

    def queue_job(self, job: Dispatch) -> None:
        if not self.jobs:
            self.since_s = job.ready_s
        self.jobs[job] = None
        self.jobs_s += job.route.prefill_s

    def end_job(self, job: Dispatch, now_s: float) -> bool:
        """The prefill was seen to end. False where that is known already."""
        if job not in self.unfinished:
            return False
        del self.unfinished[job]
        self.take_out(job, now_s)
        return True

    def take_out(self, job: Dispatch, now_s: float) -> None:
        if job in self.jobs:
            first = next(iter(self.jobs)) is job
            self._drop(job)
            if first:
                self.since_s = now_s

    def _drop(self, job: Dispatch) -> None:
        del self.jobs[job]
        self.jobs_s = self.jobs_s - job.route.prefill_s if self.jobs else 0.0

    def own_end_s(self, now_s: float) -> float | None:
        """When the own jobs will have ended; None: there are none."""
        while self.jobs:
            first = next(iter(self.jobs))
            end_s = max(self.since_s, first.ready_s) + first.route.prefill_s
            if end_s > now_s:
                break
            if first.shows_prefill:
                # Nothing is known of an overdue prefill but that it is late: it is taken to need as
                # much time again.
                end_s = 2 * now_s - end_s
                break
            # A node that serves alone and does not stream the answer shows the end of the prefill
            # only when the answer is complete.
            self._drop(first)
            self.since_s = end_s
        if not self.jobs:
            return None
        last = next(reversed(self.jobs))
        return max(end_s + self.jobs_s - first.route.prefill_s, last.ready_s + last.route.prefill_s)

    def free_at_s(self, now_s: float) -> float | None:
        """When the node will have done all that is known at `now_s`; None: it is idle."""
        own_s = self.own_end_s(now_s)
        others_s = self.others_until_s - now_s
        if own_s is None:
            return self.others_until_s if others_s > 0 else None
        return own_s + max(0.0, others_s)

    def free_from_s(self, now_s: float) -> float:
        """The same, of a node that is idle from now on at most."""
        free_at_s = self.free_at_s(now_s)
        return now_s if free_at_s is None else free_at_s


class Board:
    """One per router. `clusters`: the PD clusters, then PrfaaS clusters in the plan's order."""

    def __init__(
        self,
        costs: Costs | Mapping[ClusterId, Costs],
        clusters: Sequence[tuple[ClusterId, Sequence[NodeId]]],
        links: Mapping[LinkId, LinkView],
        *,
        slots: int | Mapping[ClusterId, int],
        kv_bytes: float = math.inf,
    ) -> None:
        """`slots` and `kv_bytes`: limit of the decode batch, and decode memory, of each node. With
        several PD clusters, `costs` and `slots` are given for each of them by name. A PrfaaS
        cluster prefills for the PD clusters that it has a link to."""
        of_homes = costs if isinstance(costs, Mapping) else {clusters[0][0]: costs}
        self._slots = slots
        self._kv_bytes = kv_bytes
        self._nodes: dict[NodeId, _BoardNode] = {}
        self._clusters = {name: ClusterView(name) for name, _ in clusters}
        self._numbers: dict[NodeId, int] | None = None  # made when a view needs them
        self._homes = BoardHomes(of_homes, self._clusters, links)
        for name, nodes in clusters:
            for node in nodes:
                self.join(name, node)

    def view(
        self,
        now_s: float,
        cached: Mapping[NodeId, CachedPrefix],
        held: Mapping[ClusterId, HeldWork],
        home: ClusterId | None = None,
    ) -> View:
        """The state for one decision, for a request of the PD cluster `home` (the first one, if it
        is not given). The view shows the nodes as they are: it must be used before the board
        changes again."""
        if not isinstance(cached, CachedPrefixes):
            if self._numbers is None:
                self._numbers = {name: number for number, name in enumerate(self._nodes)}
            cached = group_prefixes(cached, self._numbers)
        at = self._homes.get(home)
        return View(
            now_s, at.local, at.remotes, at.links, at.costs, cached, held, self._homes.several
        )

    def set_costs(self, costs: Costs, home: ClusterId | None = None) -> None:
        """Replaces the costs of a PD cluster (the first one, if it is not given), from the next
        view on."""
        self._homes.get(home).costs = costs

    def cluster(self, name: ClusterId) -> ClusterView:
        return self._clusters[name]

    def node(self, name: NodeId) -> NodeView:
        return self._nodes[name].view

    def own_sequences(self, name: NodeId) -> OwnSequences:
        node = self._nodes[name]
        return OwnSequences(node.own_decodes, node.view.active - node.other_decodes)

    def decoding(self, name: NodeId) -> Decoding:
        """As it is now: the next record changes it."""
        node = self._nodes[name]
        return Decoding(node.decodes_of, node.other_running)

    def __contains__(self, name: NodeId) -> bool:
        return name in self._nodes

    # Members --------------------------------------------------------------------------------------

    def join(self, cluster_name: ClusterId, name: NodeId) -> None:
        assert name not in self._nodes, name
        cluster = self._clusters[cluster_name]
        slots = self._slots
        if not isinstance(slots, int):
            slots = slots.get(cluster_name, 0)  # a node of a PrfaaS cluster never decodes
        view = NodeView(name, "prefill", True, -math.inf, 0, 0, slots, self._kv_bytes)
        self._nodes[name] = _BoardNode(view, cluster)
        cluster.put(view)
        self._numbers = None

    def leave(self, name: NodeId) -> bool:
        """Removes a node. Returns False, and keeps the node, while own requests depend on it: their
        ends are still to be recorded."""
        node = self._nodes[name]
        if node.view.queued or node.view.active > node.other_decodes:
            return False
        del self._nodes[name]
        node.cluster.remove(name)
        self._numbers = None
        return True

    def link(self, link_id: LinkId) -> LinkView | None:
        """None where no request is handed off over the link."""
        return self._homes.find_link(link_id)

    # Dispatches of this router --------------------------------------------------------------------

    def record_dispatch(
        self,
        route: Route,
        kv_bytes: float,
        now_s: float,
        *,
        streams: bool = True,
        sequences: int = 1,
        tenant: str = "",
    ) -> Dispatch:
        """A request of the tenant was dispatched; `kv_bytes` of decode memory and so many slots as
        it has `sequences` are reserved for it. `streams`: whether its answer streams."""
        job = Dispatch(
            route,
            kv_bytes,
            now_s,
            shows_prefill=streams or not route.alone,
            sequences=sequences,
            tenant=tenant,
        )
        node = self._nodes[route.prefill]
        start = node.view.free_at_s
        node.add_job(job)
        node.set_work(max(start, job.ready_s) + route.prefill_s, +1)
        self._nodes[route.decode].reserve(sequences, kv_bytes)
        if route.next_alone_s is not None:
            next_s = max(node.view.next_alone_s, route.next_alone_s)
            node.put(node.view._replace(next_alone_s=next_s))
        if route.offloaded:
            self._reserve_link(route, route.nbytes)
        for cluster, tokens in route.credits:
            link_id = (cluster, route.decode_cluster)
            link = self._homes.link(link_id)
            self._homes.put_link(link_id, link._replace(credit_tokens=link.credit_tokens + tokens))
        return job

    def record_prefilled(self, job: Dispatch, now_s: float) -> bool:
        """The prefill was seen to end, or was given up: the node is free for the next one. Returns
        False where that was recorded before."""
        node = self._nodes.get(job.route.prefill)  # None: it has left since its prefill ended
        if node is None or not node.end_job(job, now_s):
            return False
        node.set_work(node.free_from_s(now_s), -1)
        return True

    def record_unready(self, job: Dispatch, now_s: float) -> None:
        """The prefill cannot begin yet, and nothing says when: others go before it. Its node keeps
        it. `record_ready`, or the end of the attempt, follows."""
        node = self._nodes[job.route.prefill]
        node.take_out(job, now_s)
        node.set_work(node.free_from_s(now_s), 0)

    def record_ready(self, job: Dispatch, now_s: float) -> None:
        """The prefill can begin: it is the last one of its node's queue."""
        node = self._nodes[job.route.prefill]
        if job in node.unfinished:
            job.ready_s = max(job.ready_s, now_s)
            node.queue_job(job)
            node.set_work(node.free_from_s(now_s), 0)

    def record_handoff(self, job: Dispatch, now_s: float, took_s: float = 0.0) -> None:
        """The hand-off is in place, and decoding can begin. `took_s`, where it is known: how long
        the prefill took of a node that serves the request alone. If it took longer than predicted,
        the node gets the next one later, in proportion."""
        route = job.route
        self.record_prefilled(job, now_s)
        self._nodes[route.decode].add_decodes(job.tenant, job.sequences)
        if route.next_alone_s is not None and took_s > route.prefill_s:
            node, began_s = self._nodes[route.prefill], now_s - took_s
            pause_s = (route.next_alone_s - job.at_s) * took_s / route.prefill_s
            next_s = max(node.view.next_alone_s, began_s + pause_s)
            node.put(node.view._replace(next_alone_s=next_s))
        if route.offloaded:
            self._reserve_link(route, -route.nbytes)

    def record_end(self, job: Dispatch) -> None:
        """The last token was sent, or the stream broke after the hand-off."""
        decode = self._nodes[job.route.decode]
        decode.add_decodes(job.tenant, -job.sequences)
        decode.reserve(-job.sequences, -job.kv_bytes)

    def record_failure(self, job: Dispatch, now_s: float) -> None:
        """The attempt failed before its hand-off was in place."""
        route = job.route
        self.record_prefilled(job, now_s)
        self._nodes[route.decode].reserve(-job.sequences, -job.kv_bytes)
        if route.offloaded:
            self._reserve_link(route, -route.nbytes)

    def has_own_prefills(self, name: NodeId) -> bool:
        """Whether this router has not seen the end of a prefill there."""
        return name in self._nodes and bool(self._nodes[name].unfinished)

    def own_prefills(self, name: NodeId, now_s: float) -> OwnPrefills:
        """Those that this router has not seen end."""
        node = self._nodes[name]
        end_s = node.own_end_s(now_s)
        return OwnPrefills(len(node.unfinished), 0.0 if end_s is None else end_s - now_s)

    def _reserve_link(self, route: Route, nbytes: int) -> None:
        link_id = (route.cluster, route.decode_cluster)
        link = self._homes.link(link_id)
        self._homes.put_link(link_id, link._replace(pending_bytes=link.pending_bytes + nbytes))

    # Reports --------------------------------------------------------------------------------------

    def record_report(self, name: NodeId, report: NodeReport) -> None:
        node, view = self._nodes[name], self._nodes[name].view
        node.others_until_s = report.at_s + report.others_s if report.others_s > 0 else -math.inf
        free_at = node.free_at_s(report.at_s)
        if free_at is None:  # it stays idle since when it was
            free_at = min(view.free_at_s, report.at_s)
        others = node.other_running = max(0, report.decoding - node.own_decodes)
        if report.running is not None:
            own = held_slots(node.decodes_of.values(), view.slots)
            node.other_running = min(others, max(0, report.running - own))
        if others != node.other_decodes or abs(free_at - view.free_at_s) > _SAME_S:
            active = view.active + others - node.other_decodes
            node.other_decodes = others
            node.put(view._replace(free_at_s=free_at, active=active))

    def record_link_report(self, link_id: LinkId, stats: LinkStats) -> None:
        link = self._homes.link(link_id)
        self._homes.put_link(link_id, link._replace(stats=stats, up=stats.connections > 0))

    def assign(self, name: NodeId, role: Role, *, usable: bool) -> None:
        """A node takes a role, drains (not usable), is lost or returns."""
        node = self._nodes[name]
        node.put(node.view._replace(role=role, usable=usable))

    def forget_work(self, name: NodeId) -> None:
        """A node lost all work that was dispatched to it."""
        node = self._nodes[name]
        node.jobs.clear()
        node.jobs_s, node.others_until_s = 0.0, -math.inf
        node.put(node.view._replace(free_at_s=-math.inf))

    def set_pace(self, name: NodeId, pace: float) -> None:
        """The node's prefills take `pace` times as long as its cluster's usually do."""
        node = self._nodes[name]
        node.put(node.view._replace(pace=pace))
