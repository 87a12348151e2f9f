"""The bytes and tokens of an emulated sequence, as a function of its token ids only. Pure.

Every token's bytes depend on all tokens up to it, on the group and on the layer, as real state
does. So the prompt suffices to check that state is its own, complete and in place.

    prefix[i]     sum of mix(token j, j) over j <= i          (64 bits, wrapping)
    token i       (prefix[i] ^ salt(group, layer)) + k * STEP for its k-th eight bytes
    state after l the same with prefix[l - 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from prfaas.errors import EngineError
from prfaas.kvspec import KVSpec, LinearState, Segment

Words: TypeAlias = npt.NDArray[np.uint64]
STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its multiples do not repeat


class Content:
    def __init__(self, spec: KVSpec, prompt: Sequence[int]) -> None:
        self._spec = spec
        ids = np.asarray(prompt, dtype=np.uint64)
        places = np.arange(1, len(ids) + 1, dtype=np.uint64)
        self._prefix: Words = np.cumsum(_mixed(_mixed(places * STEP) + ids), dtype=np.uint64)

    def of(self, segment: Segment) -> npt.NDArray[np.uint8]:
        group = self._spec[segment.group]
        if isinstance(group, LinearState):
            prefix, width = self._prefix[segment.stop - 1 : segment.stop], group.state_bytes
        else:
            prefix, width = self._prefix[segment.start : segment.stop], group.bytes_per_token
        salt = np.uint64(xxhash.xxh64_intdigest(f"{segment.group}/{segment.layer}".encode()))
        words = -(-width // 8)
        filled = (prefix ^ salt)[:, None] + np.arange(words, dtype=np.uint64) * STEP
        return filled.view(np.uint8)[:, :width].reshape(-1)

    def write(self, segment: Segment, buffers: Sequence[memoryview]) -> int:
        """Fills the buffers and returns their size in bytes."""
        data, at = self.of(segment), 0
        for buffer in buffers:
            np.frombuffer(buffer, np.uint8)[:] = data[at : at + buffer.nbytes]
            at += buffer.nbytes
        if at != len(data):
            raise EngineError(f"segment {segment.name}: the buffers have {at} of {len(data)} bytes")
        return at

    def check(self, segment: Segment, views: Sequence[memoryview]) -> None:
        data, at = self.of(segment), 0
        for view in views:
            if not np.array_equal(np.frombuffer(view, np.uint8), data[at : at + view.nbytes]):
                raise EngineError(f"segment {segment.name} is not the state of this prompt")
            at += view.nbytes
        if at != len(data):
            raise EngineError(f"segment {segment.name}: {at} of {len(data)} bytes")

    def tokens(self, count: int, vocab_size: int, seed: int) -> list[int]:
        """The tokens generated after the prompt. Another seed gives other tokens."""
        places = np.arange(1, count + 1, dtype=np.uint64) * STEP
        words = _mixed(
            places ^ _mixed(self._prefix[-1:] + np.array([seed % 2**64], dtype=np.uint64))
        )
        answer: list[int] = (words % np.uint64(vocab_size)).tolist()
        return answer


def _mixed(words: Words) -> Words:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
