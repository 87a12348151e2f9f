"""Prefix caches of the simulated nodes: the real pool for prefills, the real index at the router.

Bookkeeping only, without bytes. Stored and evicted blocks reach the index `event_lag_s` later, so
the router may count on a block that is evicted already, as a live router may. A prefill pins the
prefix it resumes from and stores its checkpoints. A decode node stores the hand-offs it receives in
its `DecodeCache`: attention blocks, and states where the hand-off ends on a block boundary. When an
answer has ended, it is stored there, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import CostAware
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.index import NodeInfo, PrefixIndex
from prfaas.cache.journal import Journal
from prfaas.cache.lease import Lease
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import choose_layout
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.kvspec import KVSpec
from prfaas.planner.profile import PrefillProfile
from prfaas.scheduler.handoff import choose_handoff
from prfaas.scheduler.lookup.prefixes import CachedPrefixes, Holders
from prfaas.sim.config import CacheConfig
from prfaas.sim.decode_cache import DecodeCache
from prfaas.sim.events import Events
from prfaas.types import BlockHash, ClusterId, HashEvent, NodeId, NotNow

Hashes = Sequence[BlockHash]


class _Cache:
    """One node's memory and its unsent events. The node fills the part that its role uses."""

    __slots__ = ("handoffs", "journal", "next_seq", "pool")

    def __init__(self, pool: HybridPrefixPool, handoffs: DecodeCache, journal: Journal) -> None:
        self.pool = pool
        self.handoffs = handoffs
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

    def match(self, hashes: Hashes) -> CachedPrefixes:
        """What the nodes hold of a prompt, as the router's index has it."""
        found = self._index.match_groups({self._config.block_tokens: hashes})
        return CachedPrefixes([Holders(*group) for group in found], self._index.numbers)

    def join(self, node: NodeId) -> None:
        """A node joins, or returns, with an empty cache."""
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
        handoffs = DecodeCache(
            self._rules, self._layout.unit_bytes, self._config.block_tokens, size, journal
        )
        self._caches[node] = _Cache(pool, handoffs, journal)

    def leave(self, node: NodeId) -> None:
        """A node is lost, with all it held."""
        self._index.leave(node)
        del self._caches[node]

    def open(
        self, node: NodeId, hashes: Hashes, checkpoint_tokens: tuple[int, ...] | None = None
    ) -> Lease | None:
        """Pins the prefix that the node holds and reserves the rest of the prompt. Returns None if
        the prompt does not fit. The pool chooses the checkpoints unless they are given."""
        if not hashes:
            return None
        lease = self._caches[node].pool.reserve(
            hashes,
            len(hashes) * self._config.block_tokens,
            now=self._events.now_s,
            checkpoint_tokens=checkpoint_tokens,
        )
        self._publish(node)  # the reservation may have evicted blocks
        return None if isinstance(lease, NotNow) else lease

    def commit(self, node: NodeId, lease: Lease) -> None:
        self._caches[node].pool.commit(lease.id, self._events.now_s)
        self._publish(node)

    def release(self, node: NodeId, lease: Lease) -> None:
        self._caches[node].pool.release(lease.id, self._events.now_s)

    def store_copy(self, node: NodeId, hashes: Hashes) -> None:
        """Stores a copied prefix, with its state."""
        lease = self.open(node, hashes, (len(hashes) * self._config.block_tokens,))
        if lease is not None:
            self.commit(node, lease)
            self.release(node, lease)

    def held_tokens(self, node: NodeId, hashes: Hashes) -> int:
        """The number of tokens that a hand-off to this node can leave out."""
        return self._caches[node].handoffs.attention_tokens(hashes)

    def resumable_tokens(self, node: NodeId, hashes: Hashes) -> int:
        """The number of tokens that this decode node can continue from."""
        return self._caches[node].handoffs.resumable_tokens(hashes)

    def store_handoff(self, node: NodeId, hashes: Hashes, prompt_tokens: int) -> None:
        """Stores a prompt's KV at the node that decodes it."""
        size = self._config.block_tokens
        length = choose_handoff(prompt_tokens, size, resumable=False).handoff_tokens
        on_boundary = length % size == 0
        self._caches[node].handoffs.put(hashes[: length // size], states=on_boundary)
        self._publish(node)

    def store_answer(self, node: NodeId, hashes: Hashes, prompt_tokens: int) -> None:
        """Stores prompt and answer where they were decoded, as far as they fill blocks. As live,
        the answer is not kept when the node no longer has the hand-off that precedes it."""
        if not self._config.keep_answers or not hashes:
            return
        size = self._config.block_tokens
        length = choose_handoff(prompt_tokens, size, resumable=False).handoff_tokens
        kept = self._caches[node].handoffs
        if kept.holds_attention(hashes[: length // size]):
            kept.put(hashes, states=True)
            self._publish(node)

    def holds(self, node: NodeId, hashes: Hashes) -> bool:
        """Whether the node really holds the whole prefix, so that it can be copied."""
        cache = self._caches.get(node)
        if cache is None:
            return False
        whole = len(hashes) * self._config.block_tokens
        return cache.pool.match(hashes).tokens == whole or cache.handoffs.can_resume(hashes)

    def check(self) -> None:
        self._index.check()
        for cache in self._caches.values():
            cache.pool.check()
            cache.handoffs.check()

    def _publish(self, node: NodeId) -> None:
        cache = self._caches[node]
        sent = cache.journal.take(node, self._config.block_tokens, cache.next_seq)
        if sent:
            cache.next_seq += len(sent)
            self._events.at(self._events.now_s + self._lag_s, self._deliver, (cache, sent))

    def _deliver(self, message: tuple[_Cache, list[HashEvent]]) -> None:
        cache, sent = message
        if self._caches.get(sent[0].node) is cache:  # otherwise the node was lost in the meantime
            for event in sent:
                self._index.apply(event)
