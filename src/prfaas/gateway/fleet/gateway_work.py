"""What the other gateways, and unknown clients, have at each node. Bookkeeping only.

The board knows what this gateway has dispatched and has seen end. A node reports how many requests
it has, and not whose they are or how long they take. The other gateways of the deployment say what
they have there. Requests of which no gateway tells count with this gateway's average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.gateway.client.node_client import Load
from prfaas.scheduler.board import Board, NodeReport
from prfaas.scheduler.request import Route
from prfaas.types import NodeId

_NEWEST = 0.1  # weight of the newest prefill in the average


class OthersWork(NamedTuple):
    """What other gateways have at one node."""

    prefills: int  # dispatched and not finished
    work_s: float  # seconds of these prefills that are left
    decodes: int  # requests that decode or will decode there


NO_WORK = OthersWork(0, 0.0, 0)


class GatewayWork:
    def __init__(self, board: Board, clock: Clock) -> None:
        self._board = board
        self._clock = clock
        self._mean_s: dict[NodeId, float] = {}  # of this gateway's prefills at each node
        self._others_at: Callable[[NodeId], OthersWork] = lambda _: NO_WORK
        self._unknown_s: dict[NodeId, float] = {}  # work of which no gateway tells, as last polled
        self._polled: dict[NodeId, int] = {}  # others' requests that decode there, as last polled
        self._running: dict[NodeId, int] = {}  # all sequences in its batch, as last polled

    def share_with(self, others_at: Callable[[NodeId], OthersWork]) -> None:
        """Other gateways send requests to the same nodes. `others_at` returns what they have at a
        node."""
        self._others_at = others_at

    def add(self, node: NodeId) -> None:
        self._mean_s[node] = 0.0

    def remove(self, node: NodeId) -> None:
        del self._mean_s[node]
        self._unknown_s.pop(node, None)
        self._polled.pop(node, None)
        self._running.pop(node, None)

    def record_dispatch(self, route: Route) -> None:
        mean_s = self._mean_s[route.prefill]
        weight = _NEWEST if mean_s else 1.0
        self._mean_s[route.prefill] = mean_s + weight * (route.prefill_s - mean_s)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(list(self._mean_s))

    def prefills_at(self, node: NodeId | None) -> int:
        """Prefills of this gateway that the node has not finished."""
        if node is None or node not in self._mean_s:
            return 0
        return self._board.own_prefills(node, self._clock.now()).prefills

    def has_other_prefills(self, node: NodeId) -> bool:
        """Whether other gateways prefill there."""
        return self._others_at(node).prefills > 0

    def is_busy(self, node: NodeId) -> bool:
        """Whether a gateway has a prefill at the node."""
        return self.prefills_at(node) > 0 or self.has_other_prefills(node)

    def record_load(self, node: NodeId, load: Load, own: int, asked_s: float) -> None:
        """Passes an engine's load to the board. `own` is `prefills_at` the node when it was
        polled."""
        role, decoding = self._board.node(node).role, self._board.own_sequences(node).decoding
        others, requests = self._others_at(node), load.running + load.waiting
        # At most so many prefills of this gateway were at the node while it was polled.
        own = max(own, self.prefills_at(node))
        self._polled[node] = max(0, requests - own - decoding)
        self._running[node] = load.running
        if role == "decode":
            # Other gateways' requests whose KV is still to arrive: the node does not know them yet.
            self._unknown_s[node] = 0.0
            decoding = max(requests - own, decoding + others.decodes, 0)
        else:
            unknown = max(0, requests - own - decoding - others.prefills)
            self._unknown_s[node] = unknown * self._mean_s[node]
        others_s = others.work_s + self._unknown_s[node]
        self._board.record_report(node, NodeReport(asked_s, others_s, decoding, load.running))

    def record_others(self) -> None:
        """The other gateways have reported what they have at the nodes."""
        now = self._clock.now()
        for node in self._mean_s:
            others = self._others_at(node)
            decoding = self._board.own_sequences(node).decoding
            if self._board.node(node).role == "decode":
                decoding += max(self._polled.get(node, 0), others.decodes)
            others_s = others.work_s + self._unknown_s.get(node, 0.0)
            running = self._running.get(node)
            self._board.record_report(node, NodeReport(now, others_s, decoding, running))

    def own_loads(self) -> dict[NodeId, OthersWork]:
        """What this gateway has at each node, as it tells the other gateways."""
        now = self._clock.now()
        found = {}
        for node in self._mean_s:
            own = self._board.own_prefills(node, now)
            active = self._board.own_sequences(node).active
            load = OthersWork(own.prefills, own.left_s, active)
            if load != NO_WORK:
                found[node] = load
        return found
