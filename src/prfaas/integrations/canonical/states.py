"""The state of one linear layer of one rank: from an engine's block into pages, and back.

A whole state is one row of canonical bytes: the states of all heads, then the convolution's history
of all channels. A rank holds a range of heads and some ranges of channels.
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
    readable_rows,
    writable_rows,
)
from prfaas.device.staging import Staged, StagingRing, require_ring
from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical.casts import Cast, choose_cast
from prfaas.integrations.canonical.heads import ConvShare
from prfaas.integrations.canonical.row_batches import RowBatch, load, stage_layer
from prfaas.integrations.canonical.row_moves import LayerRows, RowPart
from prfaas.kvspec.parts import Part

_ALIGNMENT = 16  # of the pieces in staging


@dataclass(frozen=True, slots=True)
class StateForm:
    """What a state's block holds, and what its canonical bytes are."""

    parts: tuple[Part, ...]  # of the whole model: state and conv; the state alone without a history
    heads: range  # the model's heads whose states this rank holds
    channels: ConvShare | None = None  # None without a history
    conv_channels_first: bool = False  # the history is [channel, column], not [column, channel]
    transposed: bool = False  # a head's state is [v, k], on the wire [k, v]: delta rule on GPUs
    relabelled: bool = False  # the shape says [v, k], the bytes are [k, v]: delta rule on CPUs


class _Piece(NamedTuple):
    """Consecutive bytes of a row, and the tensor [block, ...] that holds their elements."""

    view: torch.Tensor
    cast: Cast
    place: range
    written: bool  # by this rank; every rank reads what it holds


class StateConverter:
    """One layer of one rank. `conv` is [block, ...] and `ssm` [block, head, ...], as vLLM binds
    them to the layer."""

    def __init__(
        self,
        conv: torch.Tensor | None,
        ssm: torch.Tensor,
        form: StateForm,
        ring: StagingRing | None = None,
    ) -> None:
        """InputError when the form does not suit the tensors. Tensors on a GPU need a `ring`."""
        require_ring(ssm, ring)
        self._ring = ring
        self._form = form
        self.blocks = (ssm,) if conv is None else (ssm, conv)  # each [block, ...]
        self._num_blocks = ssm.shape[0]
        self._pieces = _pieces(conv, ssm, form)
        self.state_bytes = sum(part.nbytes for part in form.parts)  # canonical, of all heads
        self._held = _row_shape(self._pieces, self.state_bytes)
        self._own = [piece for piece in self._pieces if piece.written]
        self._written = _row_shape(self._own, self.state_bytes)
        # A state is one row, and its block has one token.
        self.rows_held = _layer_rows(self._pieces, self._held)
        self.rows_written = _layer_rows(self._own, self._written)

    def of_blocks(self, blocks: Sequence[torch.Tensor]) -> StateConverter:
        """The same conversion of other blocks on the host, shaped like `blocks`."""
        ssm, *conv = blocks
        return StateConverter(conv[0] if conv else None, ssm, self._form)

    def save(self, block_id: int, buffers: Sequence[memoryview]) -> int:
        """Writes this rank's heads and the channels that it is to write, and no other byte. Returns
        the number of bytes written, after they are in place."""
        if self._ring is not None:
            return self.stage(block_id).finish(buffers)
        self._require_block(block_id)
        for _, row in writable_rows(buffers, 1, self.state_bytes, self._written.places, 1):
            for piece in self._own:
                _write(row[0, piece.place.start : piece.place.stop], piece, block_id)
        return self._written.nbytes

    def load(self, block_id: int, views: Sequence[memoryview], *, wait: bool = True) -> int:
        """Reads this rank's heads and all channels that it holds. Returns the number of bytes read,
        after they are in place; without `wait` as `AttentionConverter.load`."""
        self._require_block(block_id)
        if self._ring is not None:
            _require_pages(views, self.state_bytes)

            batch = RowBatch([self.rows_held], [block_id], 0, 1, 1)
            copied = load(self._ring, batch, lambda _: views)
            if wait:
                self._ring.finish_loads()
            return copied
        for _, row in readable_rows(views, 1, self.state_bytes, 1):
            for piece in self._pieces:
                _read(row[0, piece.place.start : piece.place.stop], piece, block_id)
        return self._held.nbytes

    def stage(self, block_id: int) -> Staged:
        """The first half of a save from a GPU, as `AttentionConverter.stage`."""
        ring = self._ring
        if ring is None:
            raise EngineError("a state on a CPU is saved at once: use save")
        self._require_block(block_id)

        return stage_layer(ring, RowBatch([self.rows_written], [block_id], 0, 1, 1))

    def _require_block(self, block_id: int) -> None:
        if not 0 <= block_id < self._num_blocks:
            raise EngineError(
                f"block {block_id} is not among the {self._num_blocks} blocks of the states"
            )


def _pieces(conv: torch.Tensor | None, ssm: torch.Tensor, form: StateForm) -> list[_Piece]:
    if tuple(part.role for part in form.parts) not in (("state",), ("state", "conv")):
        raise InputError(
            f"parts {[part.role for part in form.parts]} are not those of a linear layer",
            where="parts",
            fix="use a state, and a conv where the layer has a convolution",
        )
    if any(len(part.shape) != 2 for part in form.parts):
        raise InputError(
            f"a linear layer has no parts of shapes {[part.shape for part in form.parts]}",
            where="parts",
            fix="use a state of (heads, elements), and a conv of (channels, columns)",
        )
    state = form.parts[0]
    total, elements = state.shape
    if form.heads.step != 1 or not 0 <= form.heads.start < form.heads.stop <= total:
        raise InputError(
            f"{form.heads} is not a range of {total} heads",
            where="heads",
            fix="give the heads that this rank holds, as a range without a step",
        )
    if (
        not ssm.numel()
        or ssm.dim() < 3
        or ssm.shape[1] != len(form.heads)
        or math.prod(ssm.shape[2:]) != elements
    ):
        raise InputError(
            f"a state of shape {tuple(ssm.shape[1:])} does not have {len(form.heads)} heads of "
            f"{elements} elements",
            where="heads",
            fix="give the heads that this rank holds",
        )
    cast = choose_cast(ssm.dtype, state.dtype, where="wire_state_dtype")
    head_bytes = elements * cast.wire.itemsize
    place = range(form.heads.start * head_bytes, form.heads.stop * head_bytes)
    found = [_Piece(_oriented(ssm, form), cast, place, True)]
    if len(form.parts) == 2:
        found += _conv_pieces(conv, form.parts[1], form, state.nbytes, ssm.shape[0])
    elif conv is not None or form.channels is not None:
        raise InputError(
            "a convolution's history has no place in the canonical form of this layer",
            where="parts",
            fix="give the part of the history, or no history",
        )
    return found


def _conv_pieces(
    conv: torch.Tensor | None, part: Part, form: StateForm, first_byte: int, blocks: int
) -> list[_Piece]:
    channels, columns = part.shape
    share = form.channels
    if conv is None or share is None:
        raise InputError(
            "the canonical form has a convolution's history, the layer has none",
            where="channels",
            fix="give the tensor of the history and the channels that this rank holds",
        )
    held = sum(len(run) for run in share.held)
    shape = tuple(conv.shape)
    if shape != (blocks, *((held, columns) if form.conv_channels_first else (columns, held))):
        raise InputError(
            f"a history of shape {shape} does not have {held} channels of {columns} columns in "
            f"each of {blocks} blocks",
            where="channels",
            fix="use no speculative decoding, which keeps more columns, or the native form",
        )
    rows = conv if form.conv_channels_first else conv.transpose(1, 2)
    if len(share.held) != len(share.written) or any(
        run.step != 1 or not 0 <= run.start < run.stop <= channels for run in share.held
    ):
        raise InputError(
            f"{share.held} are not ranges of {channels} channels",
            where="channels",
            fix="give the channels that this rank holds, as ranges without a step",
        )
    cast = choose_cast(conv.dtype, part.dtype)
    width = columns * cast.wire.itemsize
    found, at = [], 0
    for run, written in _neighbours_joined(share):
        place = range(first_byte + run.start * width, first_byte + run.stop * width)
        found.append(_Piece(rows[:, at : at + len(run)], cast, place, written))
        at += len(run)
    return found


def _neighbours_joined(share: ConvShare) -> list[tuple[range, bool]]:
    """A rank that holds all channels copies them at once."""
    found: list[tuple[range, bool]] = []
    for run, written in zip(share.held, share.written, strict=True):
        if found and found[-1] == (range(found[-1][0].start, run.start), written):
            found[-1] = (range(found[-1][0].start, run.stop), written)
        else:
            found.append((run, written))
    return found


def _oriented(ssm: torch.Tensor, form: StateForm) -> torch.Tensor:
    if not form.transposed and not form.relabelled:
        return ssm
    if ssm.dim() != 4 or (form.transposed and form.relabelled):
        raise InputError(
            f"a state of shape {tuple(ssm.shape[1:])} cannot be "
            f"{'transposed and relabelled' if form.relabelled else 'transposed'}",
            where="transposed",
            fix="use one of the two, for states of [head, v, k]",
        )
    if form.transposed:
        return ssm.transpose(2, 3)
    if not ssm[0, 0].is_contiguous():
        raise InputError(
            f"a state with strides {ssm.stride()} cannot be relabelled",
            where="relabelled",
            fix="use it for states that are contiguous within a head",
        )
    relabelled: torch.Tensor = ssm.flatten(2).unflatten(2, (ssm.shape[3], ssm.shape[2]))
    return relabelled


def _row_shape(pieces: Sequence[_Piece], row_bytes: int) -> RowShape:
    *offsets, own_bytes = _offsets(pieces)
    columns = [Column(piece.place, at) for piece, at in zip(pieces, offsets, strict=True)]
    return RowShape(row_bytes, own_bytes, joined(columns))


def _layer_rows(pieces: Sequence[_Piece], shape: RowShape) -> LayerRows:
    parts = [
        RowPart(piece.view.unsqueeze(1), (1,), piece.cast, at)
        for piece, at in zip(pieces, _offsets(pieces), strict=False)
    ]
    return LayerRows(parts, shape, 1)


def _offsets(pieces: Sequence[_Piece]) -> list[int]:
    """Where each piece begins in staging, and where the last one ends."""
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + -(-len(piece.place) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _write(target: torch.Tensor, piece: _Piece, block_id: int) -> None:
    """`target` is uint8, and may begin at any address."""
    source = piece.view[block_id]
    if _is_aligned(target, piece.cast.wire):
        piece.cast.to_wire(target.view(piece.cast.wire).view(source.shape), source)
    else:
        elements = torch.empty(source.shape, dtype=piece.cast.wire, device=source.device)
        piece.cast.to_wire(elements, source)
        target.copy_(elements.view(-1).view(torch.uint8))


def _read(source: torch.Tensor, piece: _Piece, block_id: int) -> None:
    target = piece.view[block_id]
    if not _is_aligned(source, piece.cast.wire):
        source = source.clone()
    piece.cast.from_wire(target, source.view(piece.cast.wire).view(target.shape))


def _is_aligned(memory: torch.Tensor, dtype: torch.dtype) -> bool:
    return memory.data_ptr() % dtype.itemsize == memory.storage_offset() % dtype.itemsize == 0


def _require_pages(pages: Sequence[memoryview], nbytes: int) -> None:
    found = sum(page.nbytes for page in pages)
    if found != nbytes:
        raise EngineError(f"a state of {nbytes} bytes does not fit into pages of {found} bytes")
