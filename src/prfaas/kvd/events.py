"""Cache events of this host's nodes (the pool and the engines), kept for replay. Hashes only.

Events are numbered per node, without gaps. A reader that asks for events that are no longer kept
gets a snapshot. No sockets: readers wait on an event of the loop that owns the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence, Set

import msgspec

from prfaas.cache.hashing import EngineHashes, GroupNames, hash_events
from prfaas.contracts.kvd_api import EventPage
from prfaas.types import BlockHash, HashEvent, NodeId

# Per node. A connected gateway lacks only the latest few; one that lacks more gets a snapshot.
# These are full after minutes of traffic: a larger log grows for half an hour, and serves nobody.
KEPT_EVENTS = 4_096
KEPT_HASHES = 16_384  # of all kept events of a node: 1.5 MiB
KEPT_EXITED = 256  # engines that have exited; an engine may have another name after each restart


class _RecentEvents:
    """The latest events of one node."""

    def __init__(self) -> None:
        self._events: deque[HashEvent] = deque()
        self._hashes = 0

    def extend(self, events: Sequence[HashEvent]) -> None:
        self._events.extend(events)
        self._hashes += sum(len(event.hashes) for event in events)
        while len(self._events) > KEPT_EVENTS or self._hashes > KEPT_HASHES:
            self._hashes -= len(self._events.popleft().hashes)

    def since(self, number: int) -> tuple[HashEvent, ...]:
        return tuple(event for event in self._events if event.seq >= number)


class EventLog:
    def __init__(self, instance: str) -> None:
        self.instance = instance  # identifies this process: numbers restart with it
        self._kept: dict[NodeId, _RecentEvents] = {}
        self._next: dict[NodeId, int] = {}
        self._engines: dict[NodeId, EngineHashes] = {}
        self._exited: dict[NodeId, None] = {}  # the earliest first
        self._first_seq = 0  # of a new engine: higher than any number of a forgotten one
        self._arrived = asyncio.Event()

    @property
    def nodes(self) -> dict[NodeId, int]:
        """The next event number of each node."""
        return dict(self._next)

    def next_seq(self, node: NodeId) -> int:
        return self._next.get(node, 0)

    def add(self, node: NodeId, events: Sequence[HashEvent]) -> None:
        if events:
            self._kept.setdefault(node, _RecentEvents()).extend(events)
            self._advance(node, events[-1].seq + 1)

    def publish(
        self,
        node: NodeId,
        payload: bytes,
        group_names: Mapping[int, GroupNames],
        block_tokens: int = 0,
        states: Set[str] = frozenset(),
    ) -> None:
        """Adds events that an engine has published in vLLM's format, as hashes of blocks of
        `block_tokens` tokens (0: of the engine's own blocks). Other settings than those of the
        node's earlier payloads begin anew: whatever was claimed is removed first."""
        engine = self._engines.get(node)
        if engine is not None and not engine.has_settings(group_names, block_tokens, states):
            self.forget_engine(node)
            engine = None
        if engine is None:
            self._exited.pop(node, None)
            first_seq = self._next.get(node, self._first_seq)
            engine = EngineHashes(node, group_names, first_seq, block_tokens, states)
            self._engines[node] = engine
        self.add(node, hash_events(engine, payload))
        self._advance(
            node, engine.next_seq
        )  # may exceed the last event: an unreadable payload leaves a gap

    def forget_engine(self, node: NodeId) -> None:
        """The engine has exited, and its cache with it. Its last events are kept for a while. A
        reader that asks for them later gets an empty snapshot."""
        engine = self._engines.pop(node, None)
        if engine is None:
            return
        self.add(node, hash_events(engine, _CLEARED))
        self._exited[node] = None
        if len(self._exited) > KEPT_EXITED:
            oldest = next(iter(self._exited))
            del self._exited[oldest]
            self._first_seq = max(self._first_seq, self._next.pop(oldest, 0))
            self._kept.pop(oldest, None)

    def page(
        self, node: NodeId, since: int, pool: Mapping[str, Sequence[BlockHash]] | None
    ) -> EventPage:
        """Events from number `since` on; -1 requests a snapshot. `pool`: the hashes that the pool
        holds, when `node` is the pool."""
        after = self.next_seq(node)
        kept = self._kept.get(node)
        if 0 <= since <= after:
            wanted = kept.since(since) if kept is not None else ()
            # Numbers ascend, so as many events as numbers means that none is missing.
            if len(wanted) == after - since:
                return EventPage(node, self.instance, after, wanted)
        held = pool
        if held is None:
            engine = self._engines.get(node)
            held = engine.holdings() if engine is not None else {}
        snapshot: dict[str, tuple[bytes, ...]] = {g: tuple(hashes) for g, hashes in held.items()}
        return EventPage(node, self.instance, after, snapshot=snapshot)

    async def wait(self, node: NodeId, since: int, wait_s: float) -> None:
        """Returns when there is an event of that number, or after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while self.next_seq(node) == since:
                    await self._arrived.wait()
        except TimeoutError:
            pass

    def _advance(self, node: NodeId, next_seq: int) -> None:
        if next_seq != self._next.get(node):
            self._next[node] = next_seq
            arrived, self._arrived = self._arrived, asyncio.Event()
            arrived.set()


_CLEARED = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}]])
