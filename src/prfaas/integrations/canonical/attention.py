"""Tokens of one attention layer of one rank: from an engine's blocks into pages, and back.

On a CPU, blocks are copied through views straight into the pages, and back, without index tensors
and without a copy in between. On a GPU, whole blocks are gathered into staging in the wire's order
(or scattered from it), and only rows of the segment cross the bus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from prfaas.device.row_pages import (
    Column,
    RowShape,
    joined,
    page_range,
    readable_rows,
    writable_rows,
)
from prfaas.device.staging import Staged, StagingRing, require_ring
from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical.block_copies import BlockCopies, Span
from prfaas.integrations.canonical.casts import Cast, choose_cast
from prfaas.integrations.canonical.packings import Packing, TokenView, joint_view, token_views
from prfaas.integrations.canonical.row_batches import (
    PagesOf,
    Piece,
    RowBatch,
    load,
    require_blocks,
    save,
    stage_layer,
)
from prfaas.integrations.canonical.row_moves import LayerRows, RowPart
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


class _PartCopy(NamedTuple):
    """One part of a layer: where it is in the cache, and where in a row."""

    tokens: TokenView
    cast: Cast
    place: range  # bytes of the whole part in a row of the whole model
    own: Column  # bytes of this rank's heads


class AttentionConverter:
    """One layer of one rank. A manager block is `cache.shape[0] / num_blocks` kernel blocks of the
    cache that follow each other."""

    def __init__(
        self,
        cache: torch.Tensor,
        num_blocks: int,
        form: AttentionForm,
        ring: StagingRing | None = None,
    ) -> None:
        """InputError when the form does not suit the cache. A cache on a GPU needs a `ring`."""
        if num_blocks < 1 or cache.shape[0] % num_blocks:
            raise InputError(
                f"a cache of {cache.shape[0]} kernel blocks does not divide into {num_blocks} "
                "blocks",
                where="num_gpu_blocks",
                fix="use an attention backend that divides blocks evenly, or the native form",
            )
        require_ring(cache, ring)
        self._ring = ring
        self._cache = cache
        self._form = form
        self._num_blocks = num_blocks
        self._ratio = cache.shape[0] // num_blocks
        self._parts = _part_copies(cache, form)
        keys, values = self._parts
        self._kernel_tokens = math.prod(keys.tokens.token_factors)
        self._shape = RowShape(
            row_bytes=values.place.stop,
            own_bytes=len(keys.own.place) + len(values.own.place),
            columns=joined((keys.own, values.own)),
        )
        self._joint = None
        if not form.rope_pairs and all(part.cast.plain for part in self._parts):
            self._joint = joint_view(cache, form.packing, keys.tokens.dim, values.tokens.dim)
        self.rows = LayerRows(self._row_parts(), self._shape, self._ratio)
        self._host = self._host_copies()
        self._alignment = max(copies.dtype.itemsize for _, copies in self._host)

    @property
    def block_tokens(self) -> int:
        """Tokens in a manager block."""
        return self._kernel_tokens * self._ratio

    @property
    def blocks(self) -> torch.Tensor:
        """The cache as [manager block, kernel block, ...]."""
        blocks: torch.Tensor = self._cache.unflatten(0, (self._num_blocks, self._ratio))
        return blocks

    def of_blocks(self, blocks: torch.Tensor) -> AttentionConverter:
        """The same conversion of other blocks on the host, shaped like `blocks`."""
        return AttentionConverter(blocks.flatten(0, 1), blocks.shape[0], self._form)

    @property
    def row_bytes(self) -> int:
        """Canonical bytes of one token, of all heads."""
        return self._shape.row_bytes

    def save(
        self, block_ids: Sequence[int], start: int, stop: int, buffers: Sequence[memoryview]
    ) -> int:
        """Writes this rank's heads of tokens [start, stop) into the segment's buffers, and no other
        byte. Returns the number of bytes written, after they are in place.

        `block_ids` are the manager blocks that hold these tokens: the first one begins at token
        start // block_tokens * block_tokens. EngineError when blocks or buffers do not fit.
        """
        self._require_blocks(block_ids, start, stop)
        self._require_pages(buffers, stop - start)
        if self._ring is not None:
            batch, pages_of = self._staged(block_ids, start, stop, buffers)
            return save(self._ring, batch, pages_of)
        spans = self._spans(block_ids, start)
        shape = self._shape
        for first, run in writable_rows(
            buffers, stop - start, shape.row_bytes, shape.places, self._alignment
        ):
            for cast, copies in self._host:
                elements = run.view(-1).view(copies.dtype)
                for rows, blocks in copies.pairs(elements, first, spans, first, first + len(run)):
                    cast.to_wire(rows, blocks)
        return (stop - start) * shape.nbytes

    def load(
        self,
        block_ids: Sequence[int],
        start: int,
        stop: int,
        views: Sequence[memoryview],
        *,
        wait: bool = True,
    ) -> int:
        """Reads this rank's heads of tokens [start, stop) from the segment's bytes into the blocks,
        and zeroes every other row of these blocks. `block_ids` as in `save`. Returns the number of
        bytes read, after they are in place; without `wait` a GPU has them in place, and needs the
        views no more, only after the ring's `finish_loads`."""
        self._require_blocks(block_ids, start, stop)
        self._require_pages(views, stop - start)
        if self._ring is not None:
            copied = load(self._ring, *self._staged(block_ids, start, stop, views))
            if wait:
                self._ring.finish_loads()
            return copied
        spans = self._spans(block_ids, start)
        for first, run in readable_rows(
            views, stop - start, self._shape.row_bytes, self._alignment
        ):
            for cast, copies in self._host:
                elements = run.view(-1).view(copies.dtype)
                for rows, blocks in copies.pairs(elements, first, spans, first, first + len(run)):
                    cast.from_wire(blocks, rows)
        # Engines read every row of a block, and a NaN there ruins the answer.
        lead, tail = self._others(block_ids, start, stop)
        for _, copies in self._host:
            copies.zero(spans, -lead, 0)
            copies.zero(spans, stop - start, stop - start + tail)
        return (stop - start) * self._shape.nbytes

    def stage(self, block_ids: Sequence[int], start: int, stop: int) -> Staged:
        """The first half of a save from a GPU: queues the copies and returns at once, unless
        staging is full. `finish` of the result is the second half."""
        ring = self._ring
        if ring is None:
            raise EngineError("a cache on a CPU is saved at once: use save")
        return stage_layer(ring, RowBatch([self.rows], block_ids, start, stop, self.block_tokens))

    def _staged(
        self, block_ids: Sequence[int], start: int, stop: int, buffers: Sequence[memoryview]
    ) -> tuple[RowBatch, PagesOf]:
        row_bytes = self._shape.row_bytes

        def pages_of(piece: Piece) -> Sequence[memoryview]:
            first, last = piece.tokens.start - start, piece.tokens.stop - start
            return page_range(buffers, first * row_bytes, last * row_bytes)

        return RowBatch([self.rows], block_ids, start, stop, self.block_tokens), pages_of

    def _row_parts(self) -> list[RowPart]:
        """Whole rows with one copy where a single view has their elements in the wire's order."""
        if (joint := self._joint) is not None:
            return [RowPart(joint, (self._kernel_tokens,), Cast(joint.dtype, joint.dtype), 0)]
        return [
            RowPart(part.tokens.view, part.tokens.token_factors, part.cast, part.own.at)
            for part in self._parts
        ]

    def _host_copies(self) -> list[tuple[Cast, BlockCopies]]:
        shape, joint = self._shape, self._joint
        if joint is not None and shape.is_whole:
            # The whole row in one copy.
            tokens = TokenView(joint, (self._kernel_tokens,), tuple(joint.shape[3:]))
            whole = BlockCopies(tokens, joint.dtype, shape.row_bytes, 0, plain=True)
            return [(Cast(joint.dtype, joint.dtype), whole)]
        return [
            (
                part.cast,
                BlockCopies(
                    part.tokens,
                    part.cast.wire,
                    shape.row_bytes,
                    part.own.place.start,
                    plain=part.cast.plain,
                ),
            )
            for part in self._parts
        ]

    # Tokens and blocks ----------------------------------------------------------------------------

    def _require_blocks(self, block_ids: Sequence[int], start: int, stop: int) -> None:
        require_blocks(self.rows, block_ids, start, stop)

    def _require_pages(self, pages: Sequence[memoryview], rows: int) -> None:
        found = sum(page.nbytes for page in pages)
        if found != rows * self._shape.row_bytes:
            raise EngineError(
                f"{rows} tokens of {self._shape.row_bytes} bytes do not fit into pages of {found} "
                "bytes in all"
            )

    def _others(self, block_ids: Sequence[int], start: int, stop: int) -> tuple[int, int]:
        """Rows of the blocks before `start` and from `stop` on."""
        lead = start % self.block_tokens if block_ids else 0
        return lead, len(block_ids) * self.block_tokens - lead - (stop - start)

    def _spans(self, block_ids: Sequence[int], start: int) -> list[Span]:
        spans: list[Span] = []
        row = -(start % self.block_tokens)
        for block_id in block_ids:
            block = block_id * self._ratio
            if spans and spans[-1].block + spans[-1].blocks == block:
                last = spans.pop()
                spans.append(Span(last.row, last.block, last.blocks + self._ratio))
            else:
                spans.append(Span(row, block, self._ratio))
            row += self.block_tokens
        return spans


def _part_copies(cache: torch.Tensor, form: AttentionForm) -> tuple[_PartCopy, _PartCopy]:
    first, second = form.parts
    if first.dtype != second.dtype:
        raise InputError(
            f"the parts of an attention layer have the data types {first.dtype} and {second.dtype}",
            where="parts",
            fix="use one data type for both parts",
        )
    heads, dims = zip(*(_heads_and_dim(part) for part in form.parts), strict=True)
    if heads[0] != heads[1] or not _is_within(form.heads, heads[0]):
        raise InputError(
            f"{form.heads} is not a range of the heads of parts with {heads[0]} and {heads[1]}",
            where="heads",
            fix="give the heads that this rank holds, as a range without a step",
        )
    scales = form.scales or (None, None)
    casts = [
        choose_cast(cache.dtype, part.dtype, fp8=form.fp8, scale=scale)
        for part, scale in zip(form.parts, scales, strict=True)
    ]
    if casts[0].stored != cache.dtype:
        cache = cache.view(casts[0].stored)  # fp8, as bytes
    found = list(token_views(cache, form.packing, *dims))
    if form.rope_pairs:
        if form.packing != "mla":
            raise InputError(
                f"rope_pairs is not known for the packing {form.packing!r}",
                where="rope_pairs",
                fix="use rope_pairs for MLA only",
            )
        found[1] = found[1].in_halves()
    copies: list[_PartCopy] = []
    at = own_at = 0
    for part, view, cast, dim in zip(form.parts, found, casts, dims, strict=True):
        if view.heads != len(form.heads):
            raise InputError(
                f"a cache of shape {tuple(cache.shape)} has {view.heads} heads, not the "
                f"{len(form.heads)} of {form.heads}",
                where="heads",
                fix="give the heads that this rank holds",
            )
        head_bytes = dim * cast.wire.itemsize
        own = range(at + form.heads.start * head_bytes, at + form.heads.stop * head_bytes)
        place = range(at, at + part.nbytes)
        copies.append(_PartCopy(view, cast, place, Column(own, own_at)))
        at += part.nbytes
        own_at += len(own)
    keys, values = copies
    return keys, values


def _heads_and_dim(part: Part) -> tuple[int, int]:
    """MLA's parts have no head axis: one head."""
    if part.role in ("latent", "rope") and len(part.shape) == 1:
        return 1, part.shape[0]
    if part.role in ("keys", "values") and len(part.shape) == 2:
        return part.shape[0], part.shape[1]
    raise InputError(
        f"a part {part.role!r} of shape {part.shape} is not one of attention",
        where="parts",
        fix="use keys and values of (heads, dim), or latent and rope of (dim,)",
    )


def _is_within(heads: range, total: int) -> bool:
    return heads.step == 1 and 0 <= heads.start < heads.stop <= total
