"""Prefix caches of the simulated nodes: the real pool for prefills, the real index at the router.

Bookkeeping only, no bytes. What a node stores or evicts reaches the index `event_lag_s` later, so
the router may count on what is gone already, as a live one may. A prefill pins what it resumes from
and leaves its checkpoints; what is handed to a decode node lands on its `shelf`: attention blocks,
and states where the hand-off ends on a block boundary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import CostAware
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.index import NodeInfo, NodeMatch, PrefixIndex
from prfaas.cache.journal import Journal
from prfaas.cache.lease import Lease
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import choose_layout
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.kvspec import KVSpec
from prfaas.planner.profile import PrefillProfile
from prfaas.scheduler.handoff import handoff
from prfaas.sim.config import CacheConfig
from prfaas.sim.events import Events
from prfaas.sim.shelf import Shelf
from prfaas.types import BlockHash, ClusterId, HashEvent, NodeId, NotNow

Hashes = Sequence[BlockHash]


class _Cache:
    """One node's memory and its unsent events. It fills the pool or the shelf, as its role is."""

    __slots__ = ("journal", "next_seq", "pool", "shelf")

    def __init__(self, pool: HybridPrefixPool, shelf: Shelf, journal: Journal) -> None:
        self.pool = pool
        self.shelf = shelf
        self.journal = journal
        self.next_seq = 0


class Caches:
    def __init__(
        self,
        spec: KVSpec,
        config: CacheConfig,
        nodes: Iterable[tuple[NodeId, ClusterId, PrefillProfile]],
        events: Events,
        event_lag_s: float,
    ) -> None:
        self._spec = spec
        self._config = config
        self._events = events
        self._lag_s = event_lag_s
        self._rules = rules_for(spec)
        self._layout = choose_layout(unit_bytes(spec, config.block_tokens))
        self._index = PrefixIndex()
        self._nodes = {node: (cluster, profile) for node, cluster, profile in nodes}
        self._caches: dict[NodeId, _Cache] = {}
        for node in self._nodes:
            self.join(node)

    def match(self, hashes: Hashes) -> Mapping[NodeId, NodeMatch]:
        """As the router's index has it."""
        return self._index.match({self._config.block_tokens: hashes})

    def join(self, node: NodeId) -> None:
        """A node (re)appears with an empty cache."""
        cluster, profile = self._nodes[node]
        self._index.join(NodeInfo(node, cluster, self._config.block_tokens, self._rules))
        size, journal = self._config.bytes_per_node, Journal()
        pool = HybridPrefixPool(
            self._spec,
            self._config.block_tokens,
            PoolStorage(
                self._layout,
                None if math.isinf(size) else int(size // self._layout.page_bytes),
            ),
            eviction=CostAware(
                self._rules, self._layout, self._config.block_tokens, profile.marginal_s
            ),
            checkpoints=checkpoint_policy(self._config.checkpoints, self._config.block_tokens),
            journal=journal,
        )
        shelf = Shelf(
            self._rules, self._layout.unit_bytes, self._config.block_tokens, size, journal
        )
        self._caches[node] = _Cache(pool, shelf, journal)

    def leave(self, node: NodeId) -> None:
        """A node is gone, and with it all it held."""
        self._index.leave(node)
        del self._caches[node]

    def open(
        self, node: NodeId, hashes: Hashes, checkpoint_tokens: tuple[int, ...] | None = None
    ) -> Lease | None:
        """Pins what the node has of the prompt and reserves the rest; None when it does not fit.
        Checkpoints are the pool's choice unless given."""
        if not hashes:
            return None
        lease = self._caches[node].pool.reserve(
            hashes,
            len(hashes) * self._config.block_tokens,
            now=self._events.now_s,
            checkpoint_tokens=checkpoint_tokens,
        )
        self._publish(node)  # something may have been evicted for it
        return None if isinstance(lease, NotNow) else lease

    def commit(self, node: NodeId, lease: Lease) -> None:
        self._caches[node].pool.commit(lease.id, self._events.now_s)
        self._publish(node)

    def release(self, node: NodeId, lease: Lease) -> None:
        self._caches[node].pool.release(lease.id, self._events.now_s)

    def copied(self, node: NodeId, hashes: Hashes) -> None:
        """A prefix has arrived whole, its state with it."""
        lease = self.open(node, hashes, (len(hashes) * self._config.block_tokens,))
        if lease is not None:
            self.commit(node, lease)
            self.release(node, lease)

    def held_tokens(self, node: NodeId, hashes: Hashes) -> int:
        """What a hand-off to this node can leave out."""
        return self._caches[node].shelf.attention_tokens(hashes)

    def handed(self, node: NodeId, hashes: Hashes, prompt_tokens: int) -> None:
        """A prompt's KV has arrived at the node that decodes it."""
        size = self._config.block_tokens
        length = handoff(prompt_tokens, size, resumable=False).handoff_tokens
        on_boundary = length % size == 0
        self._caches[node].shelf.put(hashes[: length // size], states=on_boundary)
        self._publish(node)

    def holds(self, node: NodeId, hashes: Hashes) -> bool:
        """Whether a copy of the whole prefix can be made from it, in truth."""
        cache = self._caches.get(node)
        if cache is None:
            return False
        whole = len(hashes) * self._config.block_tokens
        return cache.pool.match(hashes).tokens == whole or cache.shelf.can_resume(hashes)

    def check(self) -> None:
        self._index.check()
        for cache in self._caches.values():
            cache.pool.check()
            cache.shelf.check()

    def _publish(self, node: NodeId) -> None:
        cache = self._caches[node]
        told = cache.journal.take(node, self._config.block_tokens, cache.next_seq)
        if told:
            cache.next_seq += len(told)
            self._events.at(self._events.now_s + self._lag_s, self._hear, (cache, told))

    def _hear(self, message: tuple[_Cache, list[HashEvent]]) -> None:
        cache, told = message
        if self._caches.get(told[0].node) is cache:  # else it died after saying so
            for event in told:
                self._index.apply(event)
