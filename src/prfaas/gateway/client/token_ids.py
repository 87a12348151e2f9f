"""A prompt's token ids, kept as they came: parsed once into an array, for its hashes, and passed on
as the JSON that a client sent. A hundred thousand Python integers are never made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

LIMIT = 2**31  # ids are below it
_OF_LISTS = b"0123456789, \n\r\t"
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
        """From valid JSON; None: it is something else than a list of token ids, at least one."""
        # What has only digits, commas and one pair of brackets is, being JSON, a list of integers.
        if json.translate(None, _OF_LISTS) != b"[]":
            return None
        wide: npt.NDArray[Any] = np.fromstring(json.strip()[1:-1], dtype=np.int64, sep=",")
        if not wide.size or wide.max() >= LIMIT:  # what does not fit into 64 bits is the largest
            return None
        return cls(wide.astype(np.uint32), json)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"TokenIds({len(self)})"

    def json(self, stop: int | None = None) -> msgspec.Raw:
        """Of all, or of the first `stop`; at least one."""
        if stop is None or stop >= len(self):
            return msgspec.Raw(self._json)
        commas = np.flatnonzero(np.frombuffer(self._json, dtype=np.uint8) == _COMMA)
        return msgspec.Raw(self._json[: commas[stop - 1]] + b"]")
