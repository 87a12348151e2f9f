"""Keeps the view up to date: the latest reports, and this router's dispatches since then.

Bookkeeping only; gateway and simulator record the same events. A node's `free_at_s` after a report
is the reported time plus every own dispatch that the report cannot include:

    report at t: 3 s of work ───────────► free at t + 3
        own dispatch later: 2 s ─────────► free at max(t + 3, then) + 2   (computed at each report)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    work_s: float  # seconds of prefill work: the queue, and the rest of the running prefill
    decoding: int  # requests in its decode batch or waiting for a slot


class OwnRequests(NamedTuple):
    """Requests of this router that a node decodes."""

    decoding: int  # whose KV is in place and that have not ended
    active: int  # these, and those whose KV is still to arrive


class _Dispatch(NamedTuple):
    at_s: float
    ready_s: float  # when the copies it needs are made
    work_s: float


class _BoardNode:
    __slots__ = ("cluster", "dispatches", "other_decodes", "own_decodes", "view")

    def __init__(self, view: NodeView, cluster: ClusterView) -> None:
        self.view = view
        self.cluster = cluster
        self.dispatches: deque[_Dispatch] = deque()
        self.own_decodes = 0  # own requests whose KV is in place and that have not ended
        self.other_decodes = 0  # requests that the node decodes for other routers

    def put(self, view: NodeView) -> None:
        self.view = view
        self.cluster.put(view)

    # Written out, because `_replace` takes three times as long and these run for every request.

    def set_work(self, free_at_s: float, more: int) -> None:
        node, role, usable, _, queued, active, slots, free, next_s = self.view
        self.put(
            NodeView(node, role, usable, free_at_s, queued + more, active, slots, free, next_s)
        )

    def reserve(self, more: int, kv_bytes: float) -> None:
        node, role, usable, free_at, queued, active, slots, free, next_s = self.view
        left = free - kv_bytes
        self.put(NodeView(node, role, usable, free_at, queued, active + more, slots, left, next_s))


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
        return View(now_s, at.local, at.remotes, at.links, at.costs, cached, held)

    def set_costs(self, costs: Costs, home: ClusterId | None = None) -> None:
        """Replaces the costs of a PD cluster (the first one, if it is not given), from the next
        view on."""
        self._homes.get(home).costs = costs

    def cluster(self, name: ClusterId) -> ClusterView:
        return self._clusters[name]

    def node(self, name: NodeId) -> NodeView:
        return self._nodes[name].view

    def own_requests(self, name: NodeId) -> OwnRequests:
        node = self._nodes[name]
        return OwnRequests(node.own_decodes, node.view.active - node.other_decodes)

    def decoding(self, name: NodeId) -> int:
        """Requests whose KV is in place and that have not ended, also those of other routers."""
        node = self._nodes[name]
        return node.own_decodes + node.other_decodes

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

    def record_dispatch(self, route: Route, kv_bytes: float, now_s: float) -> None:
        """A request was dispatched; `kv_bytes` of decode memory are reserved for it."""
        ready_s = now_s
        if route.copies:
            ready_s += max(copy.seconds for copy in route.copies)
        node = self._nodes[route.prefill]
        node.dispatches.append(_Dispatch(now_s, ready_s, route.prefill_s))
        start = node.view.free_at_s
        node.set_work(max(start, ready_s) + route.prefill_s, +1)
        self._nodes[route.decode].reserve(+1, kv_bytes)
        if route.next_remainder_s is not None:
            next_s = max(node.view.next_remainder_s, route.next_remainder_s)
            node.put(node.view._replace(next_remainder_s=next_s))
        if route.offloaded:
            self._reserve_link(route, route.nbytes)
        for cluster, tokens in route.credits:
            link_id = (cluster, route.decode_cluster)
            link = self._homes.link(link_id)
            self._homes.put_link(link_id, link._replace(credit_tokens=link.credit_tokens + tokens))

    def record_handoff(self, route: Route, began_s: float = 0.0, took_s: float = 0.0) -> None:
        """The hand-off is in place, and decoding can begin. `took_s`, where it is known: how long
        the prefill took that began at `began_s`. If a remainder took longer than predicted, the
        node gets the next one later, in proportion."""
        node = self._nodes[route.prefill]
        node.set_work(node.view.free_at_s, -1)
        self._nodes[route.decode].own_decodes += 1
        if route.next_remainder_s is not None and took_s > route.prefill_s:
            pause_s = (route.next_remainder_s - began_s) * took_s / route.prefill_s
            next_s = max(node.view.next_remainder_s, began_s + pause_s)
            node.put(node.view._replace(next_remainder_s=next_s))
        if route.offloaded:
            self._reserve_link(route, -route.nbytes)

    def record_end(self, route: Route, kv_bytes: float) -> None:
        """The last token was sent, or the stream broke after the hand-off."""
        decode = self._nodes[route.decode]
        decode.own_decodes -= 1
        decode.reserve(-1, -kv_bytes)

    def record_failure(self, route: Route, kv_bytes: float) -> None:
        """The attempt failed before its hand-off was in place."""
        node = self._nodes[route.prefill]
        node.set_work(node.view.free_at_s, -1)
        self._nodes[route.decode].reserve(-1, -kv_bytes)
        if route.offloaded:
            self._reserve_link(route, -route.nbytes)

    def _reserve_link(self, route: Route, nbytes: int) -> None:
        link_id = (route.cluster, route.decode_cluster)
        link = self._homes.link(link_id)
        self._homes.put_link(link_id, link._replace(pending_bytes=link.pending_bytes + nbytes))

    # Reports --------------------------------------------------------------------------------------

    def record_report(self, name: NodeId, report: NodeReport) -> None:
        node = self._nodes[name]
        dispatches = node.dispatches
        while dispatches and dispatches[0].at_s <= report.at_s:
            dispatches.popleft()
        free_at = report.at_s + report.work_s
        for later in dispatches:
            free_at = max(free_at, later.ready_s) + later.work_s
        others = max(0, report.decoding - node.own_decodes)
        view = node.view
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
        node.dispatches.clear()
        node.put(node.view._replace(free_at_s=-math.inf))
