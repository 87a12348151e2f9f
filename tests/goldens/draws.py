"""Drawn values that are the same in every version of Python: only `Random.random` is used, whose
sequence is guaranteed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def share(self) -> float:
        """From 0 to 1, in 1024 steps: such values add up exactly."""
        return int(self._random.random() * 1024) / 1024

    def whole(self, least: int, most: int) -> int:
        return least + int(self._random.random() * (most - least + 1))

    def one_of(self, values: Sequence[T]) -> T:
        return values[int(self._random.random() * len(values))]

    def happens(self, share: float) -> bool:
        return self._random.random() < share
