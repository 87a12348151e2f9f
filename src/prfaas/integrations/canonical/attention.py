"""Tokens of one attention layer of one rank: from an engine's blocks into pages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prfaas.integrations.canonical.packings import Packing
from prfaas.integrations.canonical.staging import Staged, StagingRing
from prfaas.kvspec.parts import Part


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a cache holds, and what its canonical bytes are."""

    packing: Packing
    parts: tuple[Part, Part]  # of the whole model: keys and values, or latent and rope part
    heads: range  # the model's heads that this rank holds; range(1) for MLA
    rope_pairs: bool = False  # the cache has the rope part in pairs, the wire in halves (MLA)
    scales: tuple[float, float] | None = None  # of an fp8 cache: value = stored * scale
    fp8: torch.dtype | None = None  # how the bytes of an fp8 cache are read


class AttentionConverter:
    """One layer of one rank. Manager block b is the kernel blocks b * ratio to b * ratio + ratio - 1
    of the cache, where ratio = cache.shape[0] / num_blocks."""

    def __init__(
        self,
        cache: torch.Tensor,
        num_blocks: int,
        form: AttentionForm,
        ring: StagingRing | None = None,
    ) -> None:
        """InputError when the form does not suit the cache. A cache on a GPU needs a `ring`."""
        raise NotImplementedError

    @property
    def block_tokens(self) -> int:
        """Tokens in a manager block."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        """Canonical bytes of one token, of all heads."""
        raise NotImplementedError

    def save(
        self, block_ids: Sequence[int], start: int, stop: int, buffers: Sequence[memoryview]
    ) -> int:
        """Writes this rank's heads of tokens [start, stop) into the segment's buffers, and no other
        byte. Returns the number of bytes written, after they are in place.

        `block_ids` are the manager blocks that hold these tokens: the first one begins at token
        start // block_tokens * block_tokens. EngineError when blocks or buffers do not fit.
        """
        raise NotImplementedError

    def load(
        self, block_ids: Sequence[int], start: int, stop: int, views: Sequence[memoryview]
    ) -> int:
        """Reads this rank's heads of tokens [start, stop) from the segment's bytes into the blocks,
        and zeroes every other row of these blocks. Returns the number of bytes read, after they are
        in place."""
        raise NotImplementedError

    def stage(self, block_ids: Sequence[int], start: int, stop: int) -> Staged:
        """The first half of a save from a GPU: queues the copies and returns at once, unless every
        slot of the ring is in use. `finish` of the result is the second half."""
        raise NotImplementedError
