"""Rows of several layers and of any number of tokens, in pieces that fit into staging.

A piece has whole units and whole blocks: all layers of some tokens, because a unit's rows of
neighbouring layers are one piece of an arena. Only where one unit of all layers does not fit, some
of the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from prfaas.device.row_pages import page_range
from prfaas.device.staging import Chunk, StagingRing
from prfaas.errors import EngineError
from prfaas.integrations.canonical.row_moves import LayerRows, Tokens, gather_rows, scatter_rows


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Tokens [start, stop) of layers of one family."""

    layers: Sequence[LayerRows]
    block_ids: Sequence[int]  # manager blocks, from the one that holds `start`
    start: int
    stop: int
    unit_tokens: int  # tokens in a unit of the arena

    def __post_init__(self) -> None:
        require_blocks(self.layers[0], self.block_ids, self.start, self.stop)


class Piece(NamedTuple):
    layers: range  # of the batch
    blocks: list[int]  # kernel blocks
    tokens: Tokens

    @property
    def rows(self) -> int:
        return len(self.layers) * (self.tokens.stop - self.tokens.start)


# The pages of a piece: unit by unit, and in each unit layer by layer.
PagesOf = Callable[[Piece], Sequence[memoryview]]


def pieces(batch: RowBatch, most_bytes: int) -> Iterator[Piece]:
    """In the order of layers and tokens; pieces without a row of the batch are included."""
    if not batch.block_ids:
        return
    layer = batch.layers[0]
    kernel, ratio = layer.kernel_tokens, layer.ratio
    first = batch.start // layer.block_tokens * layer.block_tokens
    end = first + len(batch.block_ids) * layer.block_tokens
    blocks = [block * ratio + n for block in batch.block_ids for n in range(ratio)]
    step = math.lcm(kernel, batch.unit_tokens)
    together = min(len(batch.layers), most_bytes // (step * layer.shape.own_bytes))
    if together < 2:
        together, step = 1, kernel
    count = max(1, most_bytes // (together * step * layer.shape.own_bytes)) * step
    for low_layer in range(0, len(batch.layers), together):
        layers = range(low_layer, min(low_layer + together, len(batch.layers)))
        low = first
        while low < end:
            high = min((low // step * step) + count, end)
            start = min(max(batch.start, low), high)
            stop = max(start, min(batch.stop, high))
            some = blocks[(low - first) // kernel : (high - first) // kernel]
            yield Piece(layers, some, Tokens(low, high, start, stop, batch.unit_tokens))
            low = high


class StagedPiece:
    """A piece that is in staging, or on its way there."""

    def __init__(self, ring: StagingRing, piece: Piece, chunk: Chunk) -> None:
        self.piece = piece
        self._ring = ring
        self._chunk: Chunk | None = chunk

    def begin(self, pages: Sequence[memoryview]) -> None:
        """Queues the copy into the pages of the piece. Called once, in any thread, before `end`.
        After a failure, the piece is not in staging any more."""
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            raise EngineError("the piece is not in staging any more")
        self._chunk = self._ring.begin_write(chunk, pages)

    def end(self) -> int:
        """Waits for the device and returns the bytes, which are in the pages."""
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            raise EngineError("the piece is not in staging any more")
        return self._ring.end_write(chunk)

    def finish(self, pages: Sequence[memoryview]) -> int:
        self.begin(pages)
        return self.end()

    def discard(self) -> None:
        """Without effect after `end`."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self._ring.drop(chunk)


class StagedLayer:
    """All pieces of a batch of one layer."""

    def __init__(self, staged: Sequence[StagedPiece], row_bytes: int) -> None:
        self._staged = staged
        self._row_bytes = row_bytes

    def finish(self, buffers: Sequence[memoryview]) -> int:
        """`buffers` are the pages of the layer's segment."""
        try:
            found = sum(view.nbytes for view in buffers)
            expected = sum(one.piece.rows for one in self._staged) * self._row_bytes
            if found != expected:
                raise EngineError(f"a segment of {expected} bytes has pages of {found} bytes")
            done = written = 0
            for one in self._staged:
                first, done = done, done + one.piece.rows * self._row_bytes
                written += one.finish(page_range(buffers, first, done))
            return written
        finally:
            self.discard()

    def discard(self) -> None:
        for one in self._staged:
            one.discard()


def stage(ring: StagingRing, batch: RowBatch) -> Iterator[StagedPiece]:
    """Queues the gather of piece after piece on the current stream. Each is there at once unless
    staging is full: then another thread must finish earlier ones."""
    for piece in pieces(batch, ring.chunk_bytes):
        if piece.rows:
            yield StagedPiece(ring, piece, _gather(ring, batch, piece))


def stage_layer(ring: StagingRing, batch: RowBatch) -> StagedLayer:
    """All pieces at once, which must fit into staging. For a batch of one layer."""
    staged: list[StagedPiece] = []
    try:
        for one in stage(ring, batch):
            staged.append(one)  # noqa: PERF402 - what is there must be dropped after an error
    except BaseException:
        for one in staged:
            one.discard()
        raise
    return StagedLayer(staged, batch.layers[0].shape.row_bytes)


def save(ring: StagingRing, batch: RowBatch, pages_of: PagesOf) -> int:
    """Any number of pieces, with the gather of the next one queued before one is written. Returns
    the bytes, after they are in place."""
    written = 0
    waiting: StagedPiece | None = None
    row_bytes = batch.layers[0].shape.own_bytes
    try:
        for piece in pieces(batch, ring.chunk_bytes):
            if not piece.rows:
                continue
            if waiting is not None and piece.rows * row_bytes > ring.chunk_bytes:
                # A kernel block that is larger than a chunk may fit into staging only alone, and
                # no other thread would finish the piece that waits.
                written += waiting.finish(pages_of(waiting.piece))
                waiting = None
            last, waiting = waiting, StagedPiece(ring, piece, _gather(ring, batch, piece))
            if last is not None:
                written += last.finish(pages_of(last.piece))
        if waiting is not None:
            written += waiting.finish(pages_of(waiting.piece))
    finally:
        if waiting is not None:
            waiting.discard()
    return written


def load(ring: StagingRing, batch: RowBatch, pages_of: PagesOf) -> int:
    """Queues the loads; the ring's `finish_loads` waits for the device. Rows of the blocks outside
    of [start, stop) become zero. Returns the bytes."""
    return sum(
        _scatter(ring, batch, piece, pages_of(piece) if piece.rows else ())
        for piece in pieces(batch, ring.chunk_bytes)
    )


def warm_up(ring: StagingRing, layer: LayerRows) -> None:
    """Compiles what the layer's family needs: copies a block onto itself, on the current stream."""
    tokens = Tokens(0, layer.kernel_tokens, 0, layer.kernel_tokens, layer.kernel_tokens)

    def copy(staged: torch.Tensor) -> None:
        gather_rows([layer], [0], tokens, staged, ring.indices)
        scatter_rows([layer], [0], tokens, staged, ring.indices)

    ring.drop(ring.copy_out(layer.shape, layer.kernel_tokens, copy))


def _gather(ring: StagingRing, batch: RowBatch, piece: Piece) -> Chunk:
    layers = [batch.layers[n] for n in piece.layers]

    def fill(staged: torch.Tensor) -> None:
        gather_rows(layers, piece.blocks, piece.tokens, staged, ring.indices)

    return ring.copy_out(layers[0].shape, piece.rows, fill)


def _scatter(ring: StagingRing, batch: RowBatch, piece: Piece, pages: Sequence[memoryview]) -> int:
    layers = [batch.layers[n] for n in piece.layers]

    def indices(numbers: Sequence[int]) -> torch.Tensor:
        return ring.indices(numbers, keep=False)

    def empty(staged: torch.Tensor) -> None:
        scatter_rows(layers, piece.blocks, piece.tokens, staged, indices)

    return ring.copy_in(layers[0].shape, piece.rows, pages, empty)


def require_blocks(layer: LayerRows, block_ids: Sequence[int], start: int, stop: int) -> None:
    """EngineError unless these are the blocks of the tokens."""
    if not 0 <= start <= stop:
        raise EngineError(f"tokens {start} to {stop} are not a range")
    tokens = layer.block_tokens
    needed = -(-stop // tokens) - start // tokens if stop > start else 0
    if len(block_ids) != needed:
        raise EngineError(
            f"tokens {start} to {stop} lie in {needed} blocks of {tokens} tokens, not in "
            f"{len(block_ids)}"
        )
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < layer.num_blocks:
        raise EngineError(
            f"blocks {min(block_ids)} to {max(block_ids)} are not all among the "
            f"{layer.num_blocks} blocks of the cache"
        )
