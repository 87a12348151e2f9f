"""Which idle blocks are evicted first: least recently used, or least prefill time saved per byte.

A linear state is as large as the KV of thousands of tokens and serves one length only, so its value
depends on its position. The cost-aware policy looks at *checkpoints* (what closing groups hold at a
prefix node) and scores each one

    reuse weight of its kind  x  prefill seconds it saves  /  bytes only it holds  /  (age + 5 s)

      branch      several continuations follow it: prompts have diverged here
      head        at most answers follow it: the end of a prompt, where a conversation continues
      answer      the end of an answer that no prompt has contained yet
      superseded  one continuation follows it: the conversation has reached the next head
      spare       taken speculatively and not used since
      tail        attention blocks beyond every checkpoint: they only help to find branch points

The seconds saved count from the previous checkpoint on the path. The bytes are the checkpoint's own
when a continuation still needs the attention blocks, else also those of the run of blocks that
nothing else needs: the policy evicts both together, because the run cannot serve any prompt without
its checkpoint. 1/age is the hazard of a heavy-tailed return time. Marconi (MLSys 2025) adds recency
to FLOPs per byte with a tuned factor; a product needs no factor, and this policy distinguishes
superseded heads from live ones.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from prfaas.cache.blocks import Block, PrefixNode
from prfaas.cache.groups import GroupRule
from prfaas.cache.storage.arena import PageLayout

NodeKind: TypeAlias = Literal["branch", "head", "answer", "superseded", "spare", "tail"]
# Outdated heap entries allowed beyond one per node: each keeps a dead node and its ancestors alive.
STALE_ENTRIES = 64


class PrefillSeconds(Protocol):
    """Time to prefill `new_tokens` after `cached_tokens`, from a profile or a fit."""

    def __call__(self, new_tokens: int, cached_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class ReuseWeights:
    """How likely each kind is to be resumed from, relative to a head of the same age. The values
    were chosen on the public Mooncake traces; docs/hybrid-cache.md has their effect there."""

    branch: float = 4.0
    head: float = 1.0
    answer: float = 0.1
    superseded: float = 0.1
    spare: float = 0.05
    tail: float = 0.02
    young_s: float = 5.0  # younger ages count as this one


class LRU:
    """Evicts the least recently used block, and of one prompt the last, so that runs stay whole."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Block] = OrderedDict()

    def another(self) -> LRU:
        return LRU()

    def __len__(self) -> int:
        return len(self._queue)

    def idle(self, blocks: Sequence[Block], now: float) -> None:
        for block in reversed(blocks):
            self._queue[id(block)] = block

    def busy(self, block: Block) -> None:
        self._queue.pop(id(block), None)

    def victims(self, now: float) -> Sequence[Block]:
        return (next(iter(self._queue.values())),) if self._queue else ()

    def admits(self, new_tokens: int, cached_tokens: int, nbytes: int, now: float) -> bool:
        return True  # it is the most recent

    def check(self) -> None:
        assert all(id(block) == key for key, block in self._queue.items())


class _Class(NamedTuple):
    """Nodes of about the same value. The least recently used of them is the worst, so an eviction
    compares one node per class: some dozens of nodes instead of all."""

    kind: NodeKind
    magnitude: int  # log2 of seconds per byte


class _Place(NamedTuple):
    cls: _Class
    density: float
    serial: int


class _Worst(NamedTuple):
    node: PrefixNode | None
    score: float  # infinite without a node


class CostAware:
    def __init__(
        self,
        rules: Sequence[GroupRule],
        layout: PageLayout,
        block_tokens: int,
        prefill_seconds: PrefillSeconds,
        weights: ReuseWeights | None = None,
    ) -> None:
        self._rules = tuple(rules)
        self._layout = layout
        self._closing = tuple(index for index, rule in enumerate(rules) if rule.closes)
        self._unit_bytes = tuple(
            layout.pages(index) * layout.page_bytes for index in range(len(rules))
        )
        self._block_tokens = block_tokens
        self._prefill_seconds = prefill_seconds
        self._weights = weights or ReuseWeights()
        self._idle: dict[int, Block] = {}
        self._places: dict[PrefixNode, _Place] = {}
        self._classes: dict[_Class, list[tuple[float, int, PrefixNode]]] = {}
        self._entries = 0  # in all classes
        self._serial = 0
        self._above: PrefixNode | None = None  # its continuation was evicted last

    def another(self) -> CostAware:
        return CostAware(
            self._rules, self._layout, self._block_tokens, self._prefill_seconds, self._weights
        )

    def __len__(self) -> int:
        return len(self._idle)

    def idle(self, blocks: Sequence[Block], now: float) -> None:
        nodes: dict[PrefixNode, None] = {}
        for block in blocks:
            self._idle[id(block)] = block
            assert block.node is not None
            nodes[block.node] = None
            # Resuming from a node uses its checkpoint; passing through it does not.
            if block.group in self._closing or not self._closing:
                block.node.last_used_s = now
        for node in nodes:
            # Most of a prompt's nodes lie inside a run without a checkpoint, so they get no score.
            if node.resident_children and self._closing and not any(self._checkpoint(node)):
                self._drop(node)
            else:
                self._place(node)

    def busy(self, block: Block) -> None:
        self._idle.pop(id(block), None)
        if block.node is not None:
            self._drop(block.node)

    def victims(self, now: float) -> Sequence[Block]:
        if self._above is not None:
            self._place(self._above)
            self._above = None
        while (node := self._worst(now).node) is not None:
            before = self._places[node].cls
            self._place(node)  # its neighbours may have changed since it was placed
            place = self._places.get(node)
            if place is not None and place.cls == before:
                blocks, self._above = self._removable(node)
                return blocks
        # Every idle block precedes a block in use. Evict one of them rather than none.
        return (next(iter(self._idle.values())),) if self._idle else ()

    def admits(self, new_tokens: int, cached_tokens: int, nbytes: int, now: float) -> bool:
        seconds = self._prefill_seconds(new_tokens, cached_tokens)
        score = self._weights.answer * seconds / nbytes / self._weights.young_s
        return score > self._worst(now).score

    def _worst(self, now: float) -> _Worst:
        worst: PrefixNode | None = None
        lowest = math.inf
        for cls in list(self._classes):
            heap = self._classes[cls]
            while heap and not self._is_current(heap[0]):
                heapq.heappop(heap)
                self._entries -= 1
            if not heap:
                del self._classes[cls]
                continue
            last_used_s, _, node = heap[0]
            age_s = max(0.0, now - last_used_s) + self._weights.young_s
            score = getattr(self._weights, cls.kind) * self._places[node].density / age_s
            if score < lowest:
                worst, lowest = node, score
        return _Worst(worst, lowest)

    def _is_current(self, entry: tuple[float, int, PrefixNode]) -> bool:
        place = self._places.get(entry[2])
        return place is not None and place.serial == entry[1]

    def _place(self, node: PrefixNode) -> None:
        self._drop(node)
        blocks, _ = self._removable(node)
        if not blocks:
            return
        nbytes = sum(self._unit_bytes[block.group] for block in blocks)
        first = self._resume_depth(node) * self._block_tokens
        seconds = self._prefill_seconds(node.depth * self._block_tokens - first, first)
        density = max(seconds, 1e-12) / nbytes
        cls = _Class(self._kind(node), math.floor(math.log2(density)))
        self._serial += 1
        self._places[node] = _Place(cls, density, self._serial)
        heapq.heappush(self._classes.setdefault(cls, []), (node.last_used_s, self._serial, node))
        self._entries += 1

    def _drop(self, node: PrefixNode) -> None:
        """The node's entry stays in its heap until an eviction pops it. A pool with room for
        everything never evicts, so this bounds the number of outdated entries."""
        self._places.pop(node, None)
        if self._entries <= 2 * len(self._places) + STALE_ENTRIES:
            return
        for cls, heap in list(self._classes.items()):
            heap[:] = filter(self._is_current, heap)
            heapq.heapify(heap)
            if not heap:
                del self._classes[cls]
        self._entries = len(self._places)

    def check(self) -> None:
        entries = [entry for heap in self._classes.values() for entry in heap]
        assert len(entries) == self._entries <= 2 * len(self._places) + STALE_ENTRIES
        assert sum(map(self._is_current, entries)) == len(self._places)

    def _kind(self, node: PrefixNode) -> NodeKind:
        checkpoint = not self._closing or any(self._checkpoint(node))
        if not checkpoint:
            return "tail"
        if node.resident_children >= 2:
            return "branch"
        if node.spare and not node.hits:
            return "spare"
        if node.resident_children > node.resident_answers:
            return "superseded"
        # An answer alone supersedes nothing: the next prompt may leave it out, or be the same
        # prompt again.
        return "answer" if node.answer else "head"

    def _checkpoint(self, node: PrefixNode) -> Iterator[Block]:
        for group in self._closing:
            block = node.blocks[group]
            if block is not None and block.slot is None:
                yield block

    def _resume_depth(self, node: PrefixNode) -> int:
        """Where a prompt would resume without this node."""
        above = node.parent
        while above is not None and self._closing and not any(self._checkpoint(above)):
            above = above.parent
        return 0 if above is None else above.depth

    def _removable(self, node: PrefixNode) -> tuple[list[Block], PrefixNode | None]:
        """The blocks to evict together with this node's checkpoint, and the node above them. No
        blocks when one of them is in use."""
        if node.resident_children:
            blocks = list(self._checkpoint(node))
            return (blocks, node) if self._all_idle(blocks) else ([], None)
        blocks = _in_memory(node)
        if not self._all_idle(blocks):
            return [], None
        above = node.parent
        while (
            self._closing
            and above is not None
            and above.resident_children == 1
            and not any(self._checkpoint(above))
            and self._all_idle(run := _in_memory(above))
        ):
            blocks += run
            above = above.parent
        return blocks, above

    def _all_idle(self, blocks: Sequence[Block]) -> bool:
        return all(id(block) in self._idle for block in blocks)


def _in_memory(node: PrefixNode) -> list[Block]:
    return [block for block in node.blocks if block is not None and block.slot is None]
