"""Prompts as JSON text: token ids of any length, made faster than a server reads them. Pure.

A prompt is a list of runs; runs of one key begin with the same tokens, whatever their lengths, and
runs of different keys differ from their first tokens on. Ready-made pieces are strung together in
an order that a hash of the key gives, so 128K tokens cost a fraction of a millisecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Ids that every vocabulary has, and that are text in a byte-level one.
TEXT_IDS = range(32, 127)
PIECE_TOKENS = 64
HEAD_TOKENS = 32  # drawn one by one, so that no two keys share a block by chance
_PIECES = 4096  # a power of two: two bytes of a hash pick one without bias


class PromptPart(NamedTuple):
    key: bytes
    tokens: int


class PromptGenerator:
    def __init__(self, ids: range = TEXT_IDS, seed: int = 0) -> None:
        self._words = [str(token) for token in ids]
        drawn = np.random.default_rng(seed).integers(len(ids), size=(_PIECES, PIECE_TOKENS))
        self._pieces = [[self._words[index] for index in row] for row in drawn.tolist()]
        self._texts = [",".join(piece) for piece in self._pieces]

    def text(self, runs: Sequence[PromptPart]) -> bytes:
        """The ids of all runs, separated by commas."""
        return ",".join(part for run in runs for part in self._parts(run)).encode()

    def _parts(self, run: PromptPart) -> list[str]:
        whole, rest = divmod(max(0, run.tokens - HEAD_TOKENS), PIECE_TOKENS)
        drawn = hashlib.shake_256(run.key).digest(2 * (HEAD_TOKENS + whole + 1))
        numbers = memoryview(drawn).cast("H").tolist()
        words, texts, vocabulary = self._words, self._texts, len(self._words)
        parts = [words[number % vocabulary] for number in numbers[: min(HEAD_TOKENS, run.tokens)]]
        parts += [texts[number % _PIECES] for number in numbers[HEAD_TOKENS:-1]]
        return parts + self._pieces[numbers[-1] % _PIECES][:rest]
