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

from prfaas.gateway.client.request_body import JsonParts
from prfaas.http_client.paced_writer import Buffer

LIMIT = 2**31  # token ids are smaller
STEP = 4096  # ids between two marks
_LIST_BYTES = b"0123456789, \n\r\t"
_SPACE = b" \n\r\t"
_COMMA = ord(",")
Array: TypeAlias = npt.NDArray[np.uint32]
_NO_MARKS: Array = np.zeros(0, dtype=np.uint32)


class TokenIds:
    """`marks`: where every 4096th id of the JSON begins, from the second of these on. With marks,
    cutting a prompt of a million ids does not search all of its JSON."""

    def __init__(self, array: Array, json: Buffer, marks: Array = _NO_MARKS) -> None:
        self.array = array
        self.marks = marks
        self._json = json

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        return cls(np.array(ids, dtype=np.uint32), msgspec.json.encode(ids))

    @classmethod
    def read(cls, json: bytes) -> TokenIds | None:
        """From valid JSON. None when it is not a list of at least one token id."""
        # Valid JSON of only digits, commas, spaces and one pair of brackets is a list of integers.
        if json[:1] == b'"' or json.translate(None, _LIST_BYTES) != b"[]":
            return None
        wide: npt.NDArray[Any] = np.fromstring(json.strip()[1:-1], dtype=np.int64, sep=",")
        if not wide.size or wide.max() >= LIMIT:  # an integer over 64 bits becomes the largest
            return None
        return cls(wide.astype(np.uint32), json)

    def marked(self) -> TokenIds:
        """The same ids with marks, and with JSON that has no spaces."""
        json = bytes(self._json).translate(None, _SPACE)
        commas = np.flatnonzero(np.frombuffer(json, dtype=np.uint8) == _COMMA)
        return TokenIds(self.array, json, (commas[STEP - 1 :: STEP] + 1).astype(np.uint32))

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"TokenIds({len(self)})"

    def json(self, stop: int | None = None) -> JsonParts:
        """The JSON of all ids, or of the first `stop` ids; `stop` is at least 1."""
        if stop is None or stop >= len(self):
            return JsonParts(self._json)
        begin = end = 0
        step, rest = divmod(stop - 1, STEP)
        if len(self.marks):
            begin = int(self.marks[step - 1]) if step else 0
            end = int(self.marks[step]) if step < len(self.marks) else len(self._json)
        else:
            end, rest = len(self._json), stop - 1
        view = memoryview(self._json)
        commas = np.flatnonzero(np.frombuffer(view[begin:end], dtype=np.uint8) == _COMMA)
        return JsonParts(view[: begin + int(commas[rest])], b"]")
