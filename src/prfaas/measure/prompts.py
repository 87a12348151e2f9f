"""Synthetic prompts as JSON text, generated faster than a server reads them. Pure.

A prompt is a list of parts. Parts with one key begin with the same tokens, whatever their lengths.
Parts with different keys differ from their first tokens on. The generator joins prepared pieces in
an order that a hash of the key gives, so 128K tokens take a fraction of a millisecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Ids that every vocabulary has, and that are text in a byte-level vocabulary.
TEXT_IDS = range(32, 127)
PIECE_TOKENS = 64
HEAD_TOKENS = 32  # chosen one by one, so that two keys do not share a block by chance
_PIECES = 4096  # a power of two: two bytes of a hash select one without bias


class PromptPart(NamedTuple):
    key: bytes
    tokens: int


class PromptGenerator:
    def __init__(self, ids: range = TEXT_IDS, seed: int = 0) -> None:
        self._ids = [str(token) for token in ids]
        drawn = np.random.default_rng(seed).integers(len(ids), size=(_PIECES, PIECE_TOKENS))
        self._pieces = [[self._ids[index] for index in row] for row in drawn.tolist()]
        self._texts = [",".join(piece) for piece in self._pieces]

    def text(self, parts: Sequence[PromptPart]) -> bytes:
        """The ids of all parts, separated by commas."""
        return ",".join(text for part in parts for text in self._texts_of(part)).encode()

    def _texts_of(self, part: PromptPart) -> list[str]:
        whole, rest = divmod(max(0, part.tokens - HEAD_TOKENS), PIECE_TOKENS)
        drawn = hashlib.shake_256(part.key).digest(2 * (HEAD_TOKENS + whole + 1))
        numbers = memoryview(drawn).cast("H").tolist()
        ids, texts, vocabulary = self._ids, self._texts, len(self._ids)
        found = [ids[number % vocabulary] for number in numbers[: min(HEAD_TOKENS, part.tokens)]]
        found += [texts[number % _PIECES] for number in numbers[HEAD_TOKENS:-1]]
        return found + self._pieces[numbers[-1] % _PIECES][:rest]
