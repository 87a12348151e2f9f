"""What this gateway and the other gateways have at each node. Bookkeeping only.

A node reports how many requests it has, and not whose they are or how long they take. This gateway
knows its own, and the other gateways of the deployment say what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prfaas.clock import Clock
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.prefill_work import NO_WORK, OthersWork, PrefillWork
from prfaas.scheduler.board import Board, NodeReport
from prfaas.types import NodeId


class GatewayWork:
    def __init__(self, board: Board, clock: Clock) -> None:
        self._board = board
        self._clock = clock
        self._work: dict[NodeId, PrefillWork] = {}
        self._others_at: Callable[[NodeId], OthersWork] = lambda _: NO_WORK
        self._others_ended_s: dict[NodeId, float] = {}  # when others last had a prefill there
        self._unknown_s: dict[NodeId, float] = {}  # work of which no gateway tells, as last polled
        self._polled: dict[NodeId, int] = {}  # others' requests that decode there, as last polled

    def share_with(self, others_at: Callable[[NodeId], OthersWork]) -> None:
        """Other gateways send requests to the same nodes. `others_at` returns what they have at a
        node."""
        self._others_at = others_at

    def add(self, node: NodeId) -> None:
        self._work[node] = PrefillWork()

    def remove(self, node: NodeId) -> None:
        del self._work[node]
        self._others_ended_s.pop(node, None)
        self._unknown_s.pop(node, None)
        self._polled.pop(node, None)

    def of(self, node: NodeId) -> PrefillWork:
        return self._work[node]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(list(self._work))

    def prefills_at(self, node: NodeId | None) -> int:
        """Prefills of this gateway that the node has not finished."""
        return len(self._work[node]) if node in self._work else 0

    def has_other_prefills(self, node: NodeId) -> bool:
        """Whether other gateways prefill there."""
        return self._others_at(node).prefills > 0

    def idle_since_s(self, node: NodeId) -> float | None:
        """Since when no gateway has a prefill at the node; None: one has."""
        if self.prefills_at(node) or self.has_other_prefills(node):
            return None
        return max(self._work[node].ended_s, self._others_ended_s.get(node, 0.0))

    def record_load(self, node: NodeId, load: Load, own: int, asked_s: float) -> None:
        """Passes an engine's load to the board. `own` is `prefills_at` the node when it was
        polled."""
        work, role = self._work[node], self._board.node(node).role
        decoding = self._board.own_requests(node).decoding
        others = self._others_at(node)
        own = max(own, len(work))
        report = work.node_report(load, role, own, decoding, asked_s, others)
        self._unknown_s[node] = report.work_s - work.left_s(asked_s) - others.work_s
        self._polled[node] = max(0, load.running + load.waiting - own - decoding)
        self._board.record_report(node, report)

    def record_others(self) -> None:
        """The other gateways have reported what they have at the nodes."""
        now = self._clock.now()
        for node, work in self._work.items():
            others = self._others_at(node)
            if others.prefills:
                self._others_ended_s[node] = now
            work_s, decoding = work.left_s(now), self._board.own_requests(node).decoding
            if self._board.node(node).role == "decode":
                # The node does not know yet of requests whose KV is still to arrive.
                decoding += max(self._polled.get(node, 0), others.decodes)
            else:
                work_s += others.work_s + self._unknown_s.get(node, 0.0)
            self._board.record_report(node, NodeReport(now, work_s, decoding))

    def own_loads(self) -> dict[NodeId, OthersWork]:
        """What this gateway has at each node, as it tells the other gateways."""
        now = self._clock.now()
        found = {}
        for node, work in self._work.items():
            active = self._board.own_requests(node).active
            load = OthersWork(len(work), work.left_s(now), active)
            if load != NO_WORK:
                found[node] = load
        return found
