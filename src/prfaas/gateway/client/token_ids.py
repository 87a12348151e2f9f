"""A prompt's token ids: an array for the hashes, and the client's JSON for the nodes.

The JSON is parsed once and forwarded unchanged, so that a prompt of a hundred thousand tokens never
becomes a hundred thousand Python integers. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

LIMIT = 2**31  # token ids are smaller
_LIST_BYTES = b"0123456789, \n\r\t"
_COMMA = ord(",")
Array: TypeAlias = npt.NDArray[np.uint32]


class TokenIds:
    def __init__(self, array: Array, json: bytes) -> None:
        self.array = array
        self._json = json

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        return cls(np.array(ids, dtype=np.uint32), msgspec.json.encode(ids))

    @classmethod
    def read(cls, json: bytes) -> TokenIds | None:
        """From valid JSON. None when it is not a list of at least one token id."""
        # Valid JSON of only digits, commas, spaces and one pair of brackets is a list of integers.
        if json.translate(None, _LIST_BYTES) != b"[]":
            return None
        wide: npt.NDArray[Any] = np.fromstring(json.strip()[1:-1], dtype=np.int64, sep=",")
        if not wide.size or wide.max() >= LIMIT:  # an integer over 64 bits becomes the largest
            return None
        return cls(wide.astype(np.uint32), json)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"TokenIds({len(self)})"

    def json(self, stop: int | None = None) -> msgspec.Raw:
        """The JSON of all ids, or of the first `stop` ids; `stop` is at least 1."""
        if stop is None or stop >= len(self):
            return msgspec.Raw(self._json)
        commas = np.flatnonzero(np.frombuffer(self._json, dtype=np.uint8) == _COMMA)
        return msgspec.Raw(self._json[: commas[stop - 1]] + b"]")
