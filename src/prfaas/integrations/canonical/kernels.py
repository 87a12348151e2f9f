"""Triton kernels that copy rows between caches of several layers and staging, one launch per part.

Only for machines with Triton: `row_moves.py` imports this module lazily, and has the same copies in
plain torch. Everything is copied as integers, bit by bit.

A row of token t of layer l lies in staging at

    layers * (low - start) + l * (high - low) + (t - low)

where [low, high) are the tokens of t's unit (a block of the wire) that are within [start, stop): a
unit holds all layers, as a kvd's block does.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from prfaas.integrations.canonical.row_moves import PartLayout, Tokens

_TILE = 2048  # elements that a program copies
_SIDE = 32  # of a tile that is transposed
# Triton would compile a kernel again for numbers that 16 divides.
_CHANGING = ["layers", "first", "end", "start", "stop", "unit"]


@triton.jit
def _staged_rows(t, layer, layers, start, stop, unit):
    low = tl.maximum(t // unit * unit, start)
    high = tl.minimum(t // unit * unit + unit, stop)
    return layers * (low - start).to(tl.int64) + layer * (high - low).to(tl.int64) + (t - low)


@triton.jit(do_not_specialize=_CHANGING)
def _copy_rows(
    bases,
    blocks,
    staged,
    layers,
    first,
    end,
    start,
    stop,
    unit,
    block_stride,
    BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr,
    STRIDE_A: tl.constexpr,
    STRIDE_B: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROW: tl.constexpr,
    AT: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    LOAD: tl.constexpr,
):
    """Rows whose innermost axis is contiguous on both sides."""
    layer = tl.program_id(2)
    t = first + tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    e = tl.program_id(1) * TILE_E + tl.arange(0, TILE_E)
    exists = t < end
    block = tl.load(blocks + (t // BLOCK - first // BLOCK), mask=exists, other=0)
    inner = e // (SIZE_B * SIZE_C) * STRIDE_A + e // SIZE_C % SIZE_B * STRIDE_B + e % SIZE_C
    base = tl.load(bases + layer).to(staged.dtype)
    cell = base + (block * block_stride + t % BLOCK * TOKEN_STRIDE)[:, None] + inner[None, :]
    rows = _staged_rows(t, layer, layers, start, stop, unit)
    place = staged + (rows * ROW + AT)[:, None] + e[None, :]
    whole = exists[:, None] & (e < ELEMENTS)[None, :]
    within = whole & ((t >= start) & (t < stop))[:, None]
    if LOAD:
        tl.store(cell, tl.load(place, mask=within, other=0), mask=whole)
    else:
        tl.store(place, tl.load(cell, mask=within, other=0), mask=within)


@triton.jit(do_not_specialize=_CHANGING)
def _copy_tiles(
    bases,
    blocks,
    staged,
    layers,
    first,
    end,
    start,
    stop,
    unit,
    block_stride,
    BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SIZE_A: tl.constexpr,
    SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr,
    STRIDE_A: tl.constexpr,
    STRIDE_B: tl.constexpr,
    STRIDE_C: tl.constexpr,
    ROW: tl.constexpr,
    AT: tl.constexpr,
    SIDE_B: tl.constexpr,
    SIDE_C: tl.constexpr,
    LOAD: tl.constexpr,
):
    """Rows whose innermost axis is not the innermost one of the cache: tile by tile."""
    layer = tl.program_id(2)
    t = first + tl.program_id(0) // SIZE_A
    a = tl.program_id(0) % SIZE_A
    tiles_c: tl.constexpr = (SIZE_C + SIDE_C - 1) // SIDE_C
    b = tl.program_id(1) // tiles_c * SIDE_B + tl.arange(0, SIDE_B)
    c = tl.program_id(1) % tiles_c * SIDE_C + tl.arange(0, SIDE_C)
    block = tl.load(blocks + (t // BLOCK - first // BLOCK))
    base = tl.load(bases + layer).to(staged.dtype)
    base += block * block_stride + t % BLOCK * TOKEN_STRIDE + a * STRIDE_A
    cell = base + b[:, None] * STRIDE_B + c[None, :] * STRIDE_C
    row = _staged_rows(t, layer, layers, start, stop, unit)
    place = staged + row * ROW + AT + a * (SIZE_B * SIZE_C) + b[:, None] * SIZE_C + c[None, :]
    whole = (b < SIZE_B)[:, None] & (c < SIZE_C)[None, :]
    within = whole & (t >= start) & (t < stop)
    if LOAD:
        tl.store(cell, tl.load(place, mask=within, other=0), mask=whole)
    else:
        tl.store(place, tl.load(cell, mask=within, other=0), mask=within)


def copy_part(
    part: PartLayout,
    bases: torch.Tensor,
    blocks: torch.Tensor,
    staged: torch.Tensor,
    tokens: Tokens,
    *,
    load: bool,
) -> None:
    """Queues the copy of one part of all layers on the current stream. `bases`: the address of each
    layer's part; `blocks`: the kernel blocks of the tokens, both int64 on the device. `staged` is
    flat and has the part's data type."""
    layers, count = len(bases), tokens.end - tokens.first
    a, b, c = part.sizes
    stride_a, stride_b, stride_c = part.strides
    common = (
        bases,
        blocks,
        staged,
        layers,
        tokens.first,
        tokens.end,
        tokens.start,
        tokens.stop,
        tokens.unit,
        part.block_stride,
        part.block_tokens,
        part.token_stride,
    )
    if stride_c == 1:
        elements = a * b * c
        tile_e = min(_TILE, triton.next_power_of_2(elements))
        tile_t = max(1, _TILE // tile_e)
        grid = (triton.cdiv(count, tile_t), triton.cdiv(elements, tile_e), layers)
        _copy_rows[grid](
            *common, b, c, stride_a, stride_b, elements, part.row, part.at, tile_t, tile_e, load
        )
        return
    side_b, side_c = _sides(b, c)
    grid = (count * a, triton.cdiv(b, side_b) * triton.cdiv(c, side_c), layers)
    _copy_tiles[grid](
        *common,
        *part.sizes,
        *part.strides,
        part.row,
        part.at,
        side_b,
        side_c,
        load,
    )


def _sides(b: int, c: int) -> tuple[int, int]:
    side_c = min(_SIDE, triton.next_power_of_2(c))
    return min(_SIDE * _SIDE // side_c, triton.next_power_of_2(b)), side_c
