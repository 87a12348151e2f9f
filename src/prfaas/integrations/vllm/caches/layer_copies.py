"""Copies between the blocks of one layer and a kvd's pages: what a worker asks of either form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from prfaas.device.staging import StagingRing
from prfaas.errors import EngineError
from prfaas.integrations.canonical.block_rows import block_rows, blocks_of
from prfaas.integrations.vllm.caches.groups import CacheLayout, Move
from prfaas.integrations.vllm.caches.joint_copies import CopiedLayer, JointCopies


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

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The layer's cache: vLLM's blocks are the first axis of each tensor."""

    def of_blocks(self, blocks: Sequence[torch.Tensor]) -> LayerCopy:
        """The same copy of other blocks, on the host, with tensors shaped like `blocks`."""


class LayerCopies(NamedTuple):
    by_layer: Mapping[str, LayerCopy]  # by vLLM's name
    # Called in the thread that launches the model, before loads begin in another one.
    before_loads: Callable[[], None] = lambda: None
    # Copies of several layers at once; None where each layer is copied for itself.
    joint: JointCopies | None = None


class NativeCopy:
    """Whole blocks, byte for byte."""

    heads: range | None = None

    def __init__(self, blocks: torch.Tensor, *, writes: bool) -> None:
        self._blocks = blocks
        self.writes = writes

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return (self._blocks,)

    def of_blocks(self, blocks: Sequence[torch.Tensor]) -> NativeCopy:
        return NativeCopy(blocks[0], writes=self.writes)

    def save(self, move: Move, pages: Sequence[memoryview]) -> int:
        copy_out(self._blocks, move.block_ids, pages)
        return len(move.block_ids) * self._blocks.shape[1]

    def load(self, move: Move, pages: Sequence[memoryview]) -> int:
        copy_in(self._blocks, move.block_ids, pages)
        return len(move.block_ids) * self._blocks.shape[1]


def native_copies(
    layout: CacheLayout,
    caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    ring: StagingRing | None = None,
) -> LayerCopies:
    """With a `ring`, several layers at once."""
    copies: dict[str, LayerCopy] = {}
    joint: dict[str, CopiedLayer] = {}
    for group in layout.groups:
        for name, _ in group.layers:
            blocks = blocks_of(caches[name], num_blocks)
            copies[name] = NativeCopy(blocks, writes=group.writes)
            if ring is not None:
                rows = block_rows(blocks)
                tokens = None if group.kind == "state" else group.block_tokens
                joint[name] = CopiedLayer(rows, rows, tokens)
    if ring is None:
        return LayerCopies(copies)
    return LayerCopies(copies, ring.fence, JointCopies(ring, joint, layout.block_tokens))


def copy_out(blocks: torch.Tensor, block_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
    """Copies from the engine to pages, synchronously."""
    for piece, page in _pieces(blocks, block_ids, pages):
        page.copy_(piece)


def copy_in(blocks: torch.Tensor, block_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
    """Copies from pages to the engine, synchronously."""
    for piece, page in _pieces(blocks, block_ids, pages):
        piece.copy_(page)
    if blocks.is_cuda:
        torch.cuda.current_stream(blocks.device).synchronize()


def _pieces(
    blocks: torch.Tensor, block_ids: Sequence[int], pages: Sequence[memoryview]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of ranges that are contiguous on both sides: pages may end inside a block."""
    block_bytes = blocks.shape[1]
    page_bytes = sum(page.nbytes for page in pages)
    if page_bytes != block_bytes * len(block_ids):
        raise EngineError(
            f"{len(block_ids)} blocks of {block_bytes} bytes do not fit into {page_bytes} bytes"
        )
    at = 0
    for view in pages:
        page = torch.frombuffer(view, dtype=torch.uint8)
        done = 0
        while done < len(page):
            index, within = divmod(at, block_bytes)
            count = min(block_bytes - within, len(page) - done)
            yield blocks[block_ids[index], within : within + count], page[done : done + count]
            done += count
            at += count
