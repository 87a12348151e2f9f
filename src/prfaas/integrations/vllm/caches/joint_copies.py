"""Copies of many layers of a GPU at once, between their caches and a kvd's pages.

The rows of one layer are too small to reach the rate of the bus: a kernel per layer and request, or
a copy per layer and block, costs more than the bytes. Layers of one move that are laid out alike
are copied together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.device.staging import StagingRing
from prfaas.errors import EngineError
from prfaas.integrations.canonical.row_batches import (
    Piece,
    RowBatch,
    StagedPiece,
    load,
    stage,
    warm_up,
)
from prfaas.integrations.canonical.row_moves import LayerRows
from prfaas.integrations.vllm.caches.groups import Move
from prfaas.kvspec import Segment

LayerSegment: TypeAlias = tuple[str, Segment]  # vLLM's name of the layer
PagesOf: TypeAlias = Callable[[Sequence[Segment]], Sequence[memoryview]]


class CopiedLayer(NamedTuple):
    """One layer of this worker."""

    written: LayerRows  # what the worker saves
    held: LayerRows  # what it loads
    # Tokens in a row: 1, or those of a block where blocks are copied whole. None: a row is a state,
    # which is the whole segment, whatever its length in tokens.
    row_tokens: int | None


class StagedLayers(NamedTuple):
    """Some tokens of some layers on their way out."""

    segments: Sequence[Segment]  # of these tokens, in the order of staging
    piece: StagedPiece

    def begin(self, pages_of: PagesOf) -> None:
        """Queues the copy into the pages, for any thread. `piece.end` waits for the device."""
        try:
            self.piece.begin(pages_of(self.segments))
        except BaseException:
            self.piece.discard()  # the pages could not be found
            raise


class JointCopies:
    def __init__(
        self, ring: StagingRing, layers: Mapping[str, CopiedLayer], unit_tokens: int
    ) -> None:
        """`unit_tokens`: tokens in a block of the wire. Whole rows."""
        self._ring = ring
        self._layers = layers
        self._unit_tokens = unit_tokens
        self.batch_bytes = ring.chunk_bytes  # as many are worth a launch

    def rows(self, layer: str, move: Move) -> int:
        start, stop, _ = self._range(layer, move)
        return stop - start

    def row_bytes(self, layer: str) -> int:
        """Staging that a row of the layer takes."""
        return self._layers[layer].written.shape.own_bytes

    def stage(self, move: Move, layers: Sequence[LayerSegment]) -> Iterator[StagedLayers]:
        """Queues the gathers on the current stream, one after the other. Where staging is full,
        waits until another thread has finished earlier ones."""
        for some in self._families(layers, written=True):
            batch = self._batch(move, [self._layers[name].written for name, _ in some], some)
            for staged in stage(self._ring, batch):
                yield StagedLayers(self._segments(some, staged.piece), staged)

    def load(self, move: Move, layers: Sequence[LayerSegment], pages_of: PagesOf) -> int:
        """Queues the loads; `queued_loads` waits for the device. Returns the bytes."""
        copied = 0
        for some in self._families(layers, written=False):
            batch = self._batch(move, [self._layers[name].held for name, _ in some], some)

            def pages(piece: Piece, some: Sequence[LayerSegment] = some) -> Sequence[memoryview]:
                return pages_of(self._segments(some, piece))

            copied += load(self._ring, batch, pages)
        return copied

    def queued_loads(self) -> Callable[[], None]:
        """A function that returns after all loads that are queued by now."""
        return self._ring.queued_loads()

    def warm_up(self) -> None:
        """Compiles the kernels, with copies of vLLM's null block onto itself. For the thread that
        launches the model, before it does."""
        seen: set[object] = set()
        for layer in self._layers.values():
            for rows in (layer.written, layer.held):
                if rows.family not in seen:
                    seen.add(rows.family)
                    warm_up(self._ring, rows)

    def close(self) -> None:
        """Waits for the device and gives the registered pages back."""
        self._ring.close()

    def _families(
        self, layers: Sequence[LayerSegment], *, written: bool
    ) -> list[list[LayerSegment]]:
        """Layers that can be copied together."""
        found: dict[object, list[LayerSegment]] = {}
        for name, segment in layers:
            layer = self._layers[name]
            rows = layer.written if written else layer.held
            found.setdefault(rows.family, []).append((name, segment))
        return list(found.values())

    def _batch(
        self, move: Move, rows: Sequence[LayerRows], layers: Sequence[LayerSegment]
    ) -> RowBatch:
        return RowBatch(rows, move.block_ids, *self._range(layers[0][0], move))

    def _range(self, layer: str, move: Move) -> tuple[int, int, int]:
        """The first row of a move, the end of its rows, and the rows in a unit: what a batch calls
        tokens. EngineError when the move divides a row."""
        row = self._layers[layer].row_tokens
        if row is None:
            return 0, 1, 1
        if move.start % row or move.stop % row or self._unit_tokens % row:
            raise EngineError(
                f"tokens {move.start} to {move.stop} in units of {self._unit_tokens} are not whole "
                f"rows of {row} tokens"
            )
        return move.start // row, move.stop // row, self._unit_tokens // row

    def _segments(self, layers: Sequence[LayerSegment], piece: Piece) -> list[Segment]:
        """The share of a piece, whose layers are among these."""
        found = [layers[n] for n in piece.layers]
        row = self._layers[found[0][0]].row_tokens
        if row is None:
            return [segment for _, segment in found]
        start, stop = piece.tokens.start * row, piece.tokens.stop * row
        return [Segment(s.group, s.layer, start, stop) for _, s in found]
