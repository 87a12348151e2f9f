"""Holds that make tenants share full nodes fairly, besides those of the scheduler."""

from __future__ import annotations

from collections.abc import Collection

from prfaas.clock import Clock
from prfaas.contracts.slot_shares import has_slot, held_slots
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.placement import PlacementRequest
from prfaas.gateway.tenants import Tenants
from prfaas.scheduler.request import Route
from prfaas.scheduler.short_term import has_room
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import NodeView, View, exclude_nodes
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.types import ClusterId, NodeId


class FairHolds:
    def __init__(
        self,
        fleet: Fleet,
        tenants: Tenants,
        waiting_room: WaitingRoom[PlacementRequest],
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._waiting_room = waiting_room
        self._clock = clock

    def find(self, placement: PlacementRequest, found: Route, state: ShortTermState) -> Hold | None:
        """Several tenants share the nodes fairly only if their requests wait here, and not in the
        queues of nodes, which are in the order of arrival. So a routed request is held, under every
        policy, while every queue that could take it is long enough, or while requests of other
        tenants are before it. With one tenant, `route` decides alone."""
        if not self._tenants.several:
            return None
        queue, arrived_s, home = placement.queue, placement.request.arrived_s, found.decode_cluster
        if found.alone:
            # One node does everything, so that room in the prefill queues means nothing. It is
            # retried whenever something has ended. Of all nodes that could serve the request alone,
            # this one has the least wait.
            node = self._fleet.board.node(found.decode)
            is_free = self._is_free(node, placement.tenant)
            if is_free and self._wait_s(node.node) <= state.rules.adaptive.queue_s:
                return None
            return Hold("every decode node is busy", None, found.prefill_s, arrived_s)

        def hold(reason: str) -> Hold:
            return Hold(reason, found.cluster, found.prefill_s, arrived_s)

        view = exclude_nodes(self._view(home), placement.avoid)
        if not has_room(found.cluster, view, state):
            if self._wait_s(found.prefill) > state.rules.adaptive.queue_s:
                return hold("every prefill queue of the cluster is long enough")
        if not self.has_slot(home, placement.tenant, placement.avoid):
            reason = "no decode node has a free slot"
            return Hold(reason, self._slots_queue(found), found.prefill_s, arrived_s)
        if found.cluster == placement.waits_for:
            return None  # it is the first of its queue
        if self._waiting_room.others_are_before(found.cluster, queue):
            return hold("requests of other tenants are before it")
        # Policy `adaptive` has a rule of its own for the order of one tenant's requests.
        first_s = self._waiting_room.first(found.cluster, queue)
        if state.rules.policy != "adaptive" and first_s <= arrived_s:
            return hold("other requests have waited longer")
        return None

    def _slots_queue(self, found: Route) -> ClusterId:
        """Where requests wait for decode slots. With several PD clusters, a request that waits in
        the queue of a PrfaaS cluster tells other homes that it wants to prefill there."""
        return found.cluster if len(self._fleet.homes) == 1 else found.decode_cluster

    def has_slot(self, home: ClusterId, tenant: str, avoid: Collection[NodeId] = ()) -> bool:
        """Whether a decode node of `home` has a free slot that the tenant may take. A slot is free
        until a request's state is in place: if requests were held while others are prefilled for
        the last slots, slots would be idle for the time of a prefill."""
        nodes = self._fleet.board.cluster(home).nodes
        usable = [node for node in nodes if node.usable and node.role == "decode"]
        chosen = [node for node in usable if node.node not in avoid] or usable
        # Where no node decodes any more, a request that waits is routed anew.
        return not chosen or any(self._is_free(node, tenant) for node in chosen)

    def _is_free(self, node: NodeView, tenant: str) -> bool:
        """Nodes share their slots by the same rule, so a flood's sequences that wait there for a
        slot do not keep another tenant's request here."""
        decoding = self._fleet.board.decoding(node.node)
        held = held_slots(decoding.own.values(), node.slots, decoding.others)
        return has_slot(held, decoding.own.get(tenant, 0), node.slots)

    def _wait_s(self, node: NodeId) -> float:
        """Prefill seconds that a node has before a new request."""
        return self._fleet.board.node(node).free_at_s - self._clock.now()

    def _view(self, home: ClusterId) -> View:
        return self._fleet.board.view(self._clock.now(), {}, self._waiting_room.work, home)
