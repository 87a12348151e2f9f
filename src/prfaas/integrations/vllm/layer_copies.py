"""Copies between the blocks of one layer and a kvd's pages: what a worker asks of either form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from prfaas.integrations.vllm import tensors
from prfaas.integrations.vllm.cache_groups import CacheLayout, Move


class LayerCopy(Protocol):
    @property
    def writes(self) -> bool:
        """Whether this worker saves the layer: of several workers with equal bytes one does."""

    @property
    def heads(self) -> range | None:
        """The heads of the model that `save` writes; None: everything in the segment."""

    def save(self, move: Move, pages: Sequence[memoryview]) -> int:
        """Copies the tokens of a move to pages, synchronously. Returns the bytes."""

    def load(self, move: Move, pages: Sequence[memoryview]) -> int:
        """Copies pages into the blocks of a move, synchronously. Returns the bytes."""


class NativeCopy:
    """Whole blocks, byte for byte."""

    heads: range | None = None

    def __init__(self, blocks: torch.Tensor, *, writes: bool) -> None:
        self._blocks = blocks
        self.writes = writes

    def save(self, move: Move, pages: Sequence[memoryview]) -> int:
        tensors.save(self._blocks, move.block_ids, pages)
        return len(move.block_ids) * self._blocks.shape[1]

    def load(self, move: Move, pages: Sequence[memoryview]) -> int:
        tensors.load(self._blocks, move.block_ids, pages)
        return len(move.block_ids) * self._blocks.shape[1]


def native_copies(
    layout: CacheLayout, caches: Mapping[str, torch.Tensor], num_blocks: int
) -> dict[str, LayerCopy]:
    return {
        name: NativeCopy(tensors.blocks_of(caches[name], num_blocks), writes=group.writes)
        for group in layout.groups
        for name, _ in group.layers
    }
