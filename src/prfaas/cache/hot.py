"""The prefixes most requested lately: request counts that halve with time, bounded in number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.cache.hashing import PromptHashes
from prfaas.types import BlockHash


@dataclass(frozen=True, slots=True)
class HotPrefix:
    prompt: PromptHashes  # of the prefix only
    block_tokens: int
    tokens: int
    score: float  # requests, each counting half as much per half-life passed


@dataclass(slots=True)
class _Entry:
    prompt: PromptHashes
    block_tokens: int
    tokens: int
    score: float
    at_s: float


class HotPrefixes:
    """At most `capacity` prefixes; a new one replaces the coldest."""

    def __init__(
        self, *, half_life_s: float = 60.0, capacity: int = 64, threshold: float = 4.0
    ) -> None:
        assert half_life_s > 0 and capacity > 0
        self._half_life_s = half_life_s
        self._capacity = capacity
        self._threshold = threshold
        self._entries: dict[BlockHash, _Entry] = {}

    def observe(self, prompt: PromptHashes, block_tokens: int, tokens: int, now: float) -> None:
        """One request resumed after the first `tokens` tokens of `prompt`."""
        name = prompt.at(block_tokens)[tokens // block_tokens - 1]
        entry = self._entries.get(name)
        if entry is not None:
            entry.score = self._score(entry, now) + 1.0
            entry.at_s = max(entry.at_s, now)
            return
        if len(self._entries) == self._capacity:
            coldest = min(self._entries, key=lambda key: self._score(self._entries[key], now))
            del self._entries[coldest]
        self._entries[name] = _Entry(prompt.prefix(tokens), block_tokens, tokens, 1.0, now)

    def hottest(self, now: float) -> Iterator[HotPrefix]:
        """The prefixes above the threshold, hottest first."""
        scored = [(self._score(entry, now), entry) for entry in self._entries.values()]
        scored.sort(key=lambda item: -item[0])
        for score, entry in scored:
            if score < self._threshold:
                return
            yield HotPrefix(entry.prompt, entry.block_tokens, entry.tokens, score)

    def check(self) -> None:
        assert len(self._entries) <= self._capacity
        for name, entry in self._entries.items():
            assert entry.prompt.at(entry.block_tokens)[-1] == name
            assert entry.score >= 0

    def _score(self, entry: _Entry, now: float) -> float:
        return entry.score * math.exp2(-max(0.0, now - entry.at_s) / self._half_life_s)
