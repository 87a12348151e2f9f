"""GlobalKVManager: what every cluster has cached, and which prefixes to copy where.

The index has one name for each pool and for each engine's own cache. A node may have several pools,
one for each format of its engine; prefixes are copied between pools of equal formats only.

The router calls `match` once per request (paper, sections 3.2 and 3.4.3); the gateway feeds cache
events and reports nodes that join and leave. The manager proposes copies and never makes them: a
proposal has the prefix, source, target and bytes, and the caller knows whether the link has room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from prfaas.cache.hashing import PromptHashes
from prfaas.cache.hot import HotPrefix, HotPrefixes
from prfaas.cache.index import NodeInfo, NodeMatch, PrefixIndex
from prfaas.kvspec import KVSpec
from prfaas.types import BlockHash, ClusterId, Compat, HashEvent, NodeId


@dataclass(frozen=True, slots=True)
class ClusterMatch:
    """The best node of a cluster for one prompt."""

    node: NodeId
    tokens: int
    attention_tokens: int  # longest on any of its nodes; the claim of a cache that ignores states


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """Cached lengths for one prompt. Nodes and clusters without any of it are left out."""

    nodes: Mapping[NodeId, NodeMatch]
    clusters: Mapping[ClusterId, ClusterMatch]

    def node_tokens(self, node: NodeId) -> int:
        match = self.nodes.get(node)
        return 0 if match is None else match.tokens

    @property
    def lost_tokens(self) -> int:
        """Tokens found on a node that cannot be reused because a state or window is missing."""
        found = max((m.attention_tokens for m in self.nodes.values()), default=0)
        return found - max((m.tokens for m in self.nodes.values()), default=0)


@dataclass(frozen=True, slots=True)
class CopyProposal:
    """Copy the prefix of `tokens` tokens, named by `hashes`, so that `target` can resume there."""

    source: NodeId
    target: NodeId
    hashes: tuple[BlockHash, ...]
    tokens: int
    skip_tokens: int  # full-attention tokens that the target already holds
    nbytes: int
    crosses_clusters: bool
    compat: Compat | None = None  # of the two nodes' pools that are meant


class GlobalKVManager:
    """One per gateway. Soft state: events rebuild it."""

    def __init__(self, spec: KVSpec, hot: HotPrefixes | None = None) -> None:
        self._spec = spec
        self._index = PrefixIndex()
        self._hot = hot or HotPrefixes()

    # Events and membership ------------------------------------------------------------------------

    def join(self, info: NodeInfo, next_seq: int = 0) -> None:
        self._index.join(info, next_seq)

    def leave(self, node: NodeId) -> None:
        self._index.leave(node)

    def apply(self, event: HashEvent) -> bool:
        return self._index.apply(event)

    def snapshot(
        self, node: NodeId, held: Mapping[str, Iterable[BlockHash]], next_seq: int
    ) -> bool:
        return self._index.snapshot(node, held, next_seq)

    def sweep(self, max_blocks: int = 10_000) -> int:
        return self._index.sweep(max_blocks)

    # Matching -------------------------------------------------------------------------------------

    def match(self, prompt: PromptHashes) -> PromptMatch:
        """Cached length per node and per cluster. Changes nothing."""
        nodes = self._index.match({size: prompt.at(size) for size in self._index.block_sizes()})
        clusters: dict[ClusterId, ClusterMatch] = {}
        for node, match in nodes.items():
            cluster = self._index.info(node).cluster
            best = clusters.get(cluster)
            if best is None:
                clusters[cluster] = ClusterMatch(node, match.tokens, match.attention_tokens)
                continue
            better = match.tokens > best.tokens
            clusters[cluster] = ClusterMatch(
                node if better else best.node,
                max(match.tokens, best.tokens),
                max(match.attention_tokens, best.attention_tokens),
            )
        return PromptMatch(nodes, clusters)

    def observe(self, prompt: PromptHashes, match: PromptMatch, now: float) -> None:
        """Counts a routed request for this prompt towards the heat of its cached prefix. What an
        engine's own cache has beyond the pools does not count, because it cannot be copied."""
        pools = [n for n in match.nodes if self._index.info(n).is_pool]
        node = max(pools, key=match.node_tokens, default=None)
        if node is not None and match.node_tokens(node):
            size = self._index.info(node).block_tokens
            self._hot.observe(prompt, size, match.node_tokens(node), now)

    # Proposing copies -----------------------------------------------------------------------------

    def propose_copy(
        self,
        prompt: PromptHashes,
        match: PromptMatch,
        target: NodeId,
        sources: Collection[NodeId] | None = None,
    ) -> CopyProposal | None:
        """The longest prefix that another pool (of `sources`) has and the pool `target` lacks. A
        pool with another block size has other block hashes, and one with another format has other
        state: neither can be the source."""
        here = self._index.info(target)
        source: NodeId | None = None
        tokens = match.node_tokens(target)
        for node, found in match.nodes.items():
            if node == target or (sources is not None and node not in sources):
                continue
            there = self._index.info(node)
            same = (there.block_tokens, there.compat) == (here.block_tokens, here.compat)
            # At equal length a source in the target's cluster is cheaper.
            closer = (
                source is not None
                and found.tokens == tokens
                and self._index.info(source).cluster != here.cluster
                and there.cluster == here.cluster
            )
            if same and there.is_pool and (found.tokens > tokens or closer):
                source, tokens = node, found.tokens
        if source is None:
            return None
        held = match.nodes.get(target)
        skip = min(held.attention_tokens, tokens) if held is not None else 0
        return CopyProposal(
            source=self._index.info(source).at,
            target=here.at,
            hashes=tuple(prompt.at(here.block_tokens)[: tokens // here.block_tokens]),
            tokens=tokens,
            skip_tokens=skip,
            nbytes=self._spec.kv_bytes(tokens, skip),
            crosses_clusters=self._index.info(source).cluster != here.cluster,
            compat=here.compat,
        )

    def replications(
        self,
        now: float,
        living: Collection[NodeId],
        waits_s: Mapping[NodeId, float | None],
        *,
        saturated_s: float,
        limit: int = 16,
    ) -> list[CopyProposal]:
        """Copies of hot prefixes off saturated holders: where every holder in a cluster makes a
        prefill wait longer than `saturated_s`, a copy to that cluster's least busy other node,
        if a prefill waits less than half as long there. This keeps one prefix from pinning all
        its traffic to one node; the router decides about copies across clusters. Only the `limit`
        hottest prefixes are considered, because matching takes time.

        `living` are the pools that can be copied from. `waits_s` has the pools of the nodes in use
        and how long a prefill waits at the node, None for nodes that do not prefill."""
        prefilling = {pool: wait for pool, wait in waits_s.items() if wait is not None}
        proposals: list[CopyProposal] = []
        if all(wait <= saturated_s for wait in prefilling.values()):
            return proposals
        for hot in islice(self._hot.hottest(now), limit):
            match = self.match(hot.prompt)
            at = self._holders(hot, match)
            for waits in self._alike(prefilling, hot.block_tokens):
                held = [w for pool, w in waits.items() if self._index.info(pool).at in at]
                others = [n for n in waits if self._index.info(n).at not in at]
                if not held or not others or min(held) <= saturated_s:
                    continue
                target = min(others, key=waits.__getitem__)
                if 2 * waits[target] >= min(held):
                    continue
                proposal = self.propose_copy(hot.prompt, match, target, living)
                if proposal is not None and proposal.tokens >= hot.tokens:
                    proposals.append(proposal)
        return proposals

    def evacuations(
        self,
        pools: Collection[NodeId],
        now: float,
        living: Collection[NodeId],
        waits_s: Mapping[NodeId, float | None],
        targets: Sequence[NodeId] | None = None,
    ) -> list[CopyProposal]:
        """Copies to make before a node with these `pools` leaves: its hot prefixes that no other
        node of its cluster holds, hottest first, each from one of its pools to the cluster's least
        busy other node. Targets are nodes that prefill, or nodes that decode when no other node
        prefills. Other arguments: see `replications`.

        `targets`, for a node whose whole cluster is drained: pools of any cluster, the best one
        first. A prefix that one of them has needs no copy; otherwise it goes to the first one with
        blocks and a format that it can have."""
        others = {n: wait for n, wait in waits_s.items() if n not in pools}
        if targets is not None:
            # The place in the caller's order counts, and not how busy the nodes are.
            others = {n: float(place) for place, n in enumerate(targets) if n not in pools}
        prefilling = {n: wait for n, wait in others.items() if wait is not None}
        anywhere = targets is not None
        proposals: list[CopyProposal] = []
        for hot in self._hot.hottest(now):
            match = self.match(hot.prompt)
            kept = self._holders(hot, match)
            for pool in pools:
                if match.node_tokens(pool) < hot.tokens:
                    continue
                here = self._index.info(pool)
                keepers = self._like(here, prefilling, anywhere) or self._like(
                    here, dict.fromkeys(others, 0.0), anywhere
                )
                if not keepers or any(self._index.info(n).at in kept for n in keepers):
                    continue
                target = min(keepers, key=keepers.__getitem__)
                proposal = self.propose_copy(hot.prompt, match, target, living)
                if proposal is not None:
                    proposals.append(proposal)
                    break
        return proposals

    def _holders(self, hot: HotPrefix, match: PromptMatch) -> set[NodeId]:
        """The nodes with a pool that has the prefix, as far as the size of its blocks allows."""
        found = set()
        for name, held in match.nodes.items():
            info = self._index.info(name)
            if info.is_pool and held.tokens > hot.tokens - info.block_tokens:
                found.add(info.at)
        return found

    def _alike(
        self, waits_s: Mapping[NodeId, float], block_tokens: int
    ) -> Iterable[dict[NodeId, float]]:
        """The pools with these blocks, those of one cluster and one format together."""
        found: dict[tuple[ClusterId, Compat | None], dict[NodeId, float]] = {}
        for info in self._index.nodes():
            if info.node in waits_s and info.block_tokens == block_tokens:
                alike = found.setdefault((info.cluster, info.compat), {})
                alike[info.node] = waits_s[info.node]
        return found.values()

    def _like(
        self, here: NodeInfo, waits_s: Mapping[NodeId, float], anywhere: bool
    ) -> dict[NodeId, float]:
        """The other pools of this one's format and block size, in its cluster or `anywhere`."""
        wanted = (here.compat, here.block_tokens)
        return {
            info.node: waits_s[info.node]
            for info in self._index.nodes()
            if info.node in waits_s
            and info.at != here.at
            and (info.compat, info.block_tokens) == wanted
            and (anywhere or info.cluster == here.cluster)
        }

    def check(self) -> None:
        self._index.check()
        self._hot.check()

    def __repr__(self) -> str:
        return f"GlobalKVManager({self._index!r})"
