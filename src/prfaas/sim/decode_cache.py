"""What a decode node keeps of hand-offs and of its own answers: blocks by group, evicted in LRU
order.

The rules are the pool's (which blocks of which group make a prefix resumable), without its leases
and checkpoints: a decode node takes no checkpoints, and the engine holds the running requests. The
pool would give the same results at ten times the cost per request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prfaas.cache.groups import GroupRule
from prfaas.cache.journal import Journal
from prfaas.types import BlockHash


class DecodeCache:
    def __init__(
        self,
        rules: Sequence[GroupRule],
        unit_bytes: Sequence[int],
        block_tokens: int,
        capacity_bytes: float,
        journal: Journal,
    ) -> None:
        self._groups = list(zip(rules, unit_bytes, strict=True))
        self._block_tokens = block_tokens
        self._capacity_bytes = capacity_bytes
        self._journal = journal
        self._bytes = 0
        self._held: OrderedDict[tuple[int, BlockHash], None] = OrderedDict()

    def put(self, hashes: Sequence[BlockHash], *, states: bool) -> None:
        """Stores the state of these whole blocks; `states`: with its windows and states."""
        held, journal = self._held, self._journal
        for group, (rule, nbytes) in enumerate(self._groups):
            if rule.closes and not states:
                continue
            # The last block is stored first, so that eviction shortens a run from its end.
            for block in reversed(rule.needs(len(hashes), self._block_tokens)):
                key = (group, hashes[block])
                if key in held:
                    held.move_to_end(key)
                else:
                    held[key] = None
                    self._bytes += nbytes
                    journal.record("stored", rule.name, hashes[block])
        while self._bytes > self._capacity_bytes:
            (group, name), _ = held.popitem(last=False)
            rule, nbytes = self._groups[group]
            self._bytes -= nbytes
            journal.record("removed", rule.name, name)

    def attention_tokens(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest run of blocks, from the start, that every growing group holds."""
        full = [group for group, (rule, _) in enumerate(self._groups) if not rule.closes]
        held = self._held
        for place, name in enumerate(hashes):
            if any((group, name) not in held for group in full):
                return place * self._block_tokens
        return len(hashes) * self._block_tokens if full else 0

    def holds_attention(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether every growing group holds all of these blocks."""
        full = [group for group, (rule, _) in enumerate(self._groups) if not rule.closes]
        return all((group, name) in self._held for name in hashes for group in full)

    def can_resume(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether a prompt could resume after exactly these blocks."""
        return all(
            (group, hashes[block]) in self._held
            for group, (rule, _) in enumerate(self._groups)
            for block in rule.needs(len(hashes), self._block_tokens)
        )

    def resumable_tokens(self, hashes: Sequence[BlockHash]) -> int:
        """The longest prefix after which a prompt could resume."""
        closing = [(group, rule) for group, (rule, _) in enumerate(self._groups) if rule.closes]
        for blocks in range(self.attention_tokens(hashes) // self._block_tokens, 0, -1):
            if all(
                (group, hashes[block]) in self._held
                for group, rule in closing
                for block in rule.needs(blocks, self._block_tokens)
            ):
                return blocks * self._block_tokens
        return 0

    def check(self) -> None:
        assert self._bytes == sum(self._groups[group][1] for group, _ in self._held)
        assert self._bytes <= self._capacity_bytes
