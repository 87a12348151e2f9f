"""Tensors as rows of canonical bytes, and back.

A row is the state of one token in one layer (keys, then values), or one whole linear state (the
state, then the convolution's stored columns). transformers orders heads before tokens, the wire
form tokens before heads; the copy transposes in the same pass, so that each page is written once:

    keys   [1, H, n, Dk] ─┐ part 0: n x (H * Dk * size) bytes ┐
    values [1, H, n, Dv] ─┘ part 1: n x (H * Dv * size) bytes ┴─► rows [n, row_bytes]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from prfaas.device.row_pages import gather_bytes, scatter_bytes
from prfaas.engine.hf.shapes import StateShape, TokenShape
from prfaas.errors import EngineError

WIDEST = 8  # bytes of an element in which bytes are copied
Rows = tuple[torch.Tensor, ...]  # parts, each uint8 [n, ..., bytes], in the order of a row


def token_rows(keys: torch.Tensor, values: torch.Tensor) -> Rows:
    """n rows from keys and values, [1, heads, n, dim] each. Views, without copying."""
    return tuple(_bytes(part[0].transpose(0, 1)) for part in (keys, values))


def state_rows(state: torch.Tensor, conv: torch.Tensor | None, shape: StateShape) -> Rows:
    """One row: the state, and the convolution without the column that is never read again."""
    parts = [_bytes(state.to(shape.wire_dtype))]
    if shape.conv_channels:
        assert conv is not None
        parts.append(_bytes(conv[..., 1:]))
    return tuple(parts)


def row_bytes(rows: Rows) -> int:
    return sum(map(_width, rows))


def write(rows: Rows, buffers: Sequence[memoryview]) -> None:
    """Host tensors into a segment's buffers. Buffers that hold whole rows are written directly;
    pages that cut a row in two are filled from one packed copy."""
    width = row_bytes(rows)
    if all(view.nbytes % width == 0 for view in buffers):
        first = 0
        for view in buffers:
            count = view.nbytes // width
            target = torch.frombuffer(view, dtype=torch.uint8).view(count, width)
            fill(target, tuple(part[first : first + count] for part in rows))
            first += count
    else:
        scatter_bytes(pack(rows).view(-1), buffers)


def pack(rows: Rows) -> torch.Tensor:
    """One contiguous [n, row_bytes], on the tensors' device."""
    packed = torch.empty((len(rows[0]), row_bytes(rows)), dtype=torch.uint8, device=rows[0].device)
    fill(packed, rows)
    return packed


def _width(part: torch.Tensor) -> int:
    """Bytes of one row. Without a view of it, which takes longer than small copies."""
    return math.prod(part.shape[1:])


def fill(target: torch.Tensor, rows: Rows) -> None:
    """Copies into [n, row_bytes] of uint8, in the widest elements that fit."""
    at = 0
    for part in rows:
        width = _width(part)
        to, source = target[:, at : at + width].view(part.shape), part
        for wide in (torch.int64, torch.int32, torch.int16):
            if _fits(to, wide.itemsize) and _fits(source, wide.itemsize):
                to, source = to.view(wide), source.view(wide)
                break
        to.copy_(source)
        at += width


def fill_all(target: torch.Tensor, several: Sequence[tuple[Rows, int]]) -> None:
    """Copies the rows of several segments, each with its bytes, one after the other into flat
    uint8. Single rows that follow each other are copied with one call, because a call takes longer
    than the bytes of a state."""
    at = 0
    single: list[torch.Tensor] = []
    begin = 0  # of these, in the target
    for rows, nbytes in several:
        if len(rows[0]) == 1:
            single += [part.reshape(-1) for part in rows]
        else:
            _join(target[begin:at], single)
            fill(target[at : at + nbytes].view(len(rows[0]), -1), rows)
            begin = at + nbytes
        at += nbytes
    _join(target[begin:at], single)


def _join(target: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Takes the parts."""
    if not parts:
        return
    if all(_fits(part, WIDEST) for part in (target, *parts)):
        torch.cat([part.view(torch.int64) for part in parts], out=target.view(torch.int64))
    else:
        torch.cat(parts, out=target)
    parts.clear()


def gather(views: Sequence[memoryview], count: int, width: int) -> torch.Tensor:
    """[count, width] bytes of `count` rows, copied once."""
    packed = torch.empty((count, width), dtype=torch.uint8)
    found = sum(view.nbytes for view in views)
    if found != packed.nbytes:
        raise EngineError(f"{found} bytes of state instead of {packed.nbytes}")
    gather_bytes(views, packed.view(-1))
    return packed


def as_tokens(
    rows: torch.Tensor, shape: TokenShape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, heads, n, dim] over the same bytes, without copying."""
    k_bytes = shape.k_heads * shape.k_dim * dtype.itemsize
    keys = rows[:, :k_bytes].view(dtype).unflatten(1, (shape.k_heads, shape.k_dim))
    values = rows[:, k_bytes:].view(dtype).unflatten(1, (shape.v_heads, shape.v_dim))
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def as_state(row: torch.Tensor, shape: StateShape) -> tuple[torch.Tensor, torch.Tensor | None]:
    """State and convolution columns [1, ...], copied: layers update both in place. The oldest
    column, which is not transferred, is zero."""
    conv_bytes = shape.conv_channels * (shape.conv_columns - 1) * shape.conv_dtype.itemsize
    split = row.numel() - conv_bytes
    state = row.flatten()[:split].view(shape.wire_dtype).view(1, *shape.state)
    state = state.to(shape.kept_dtype, copy=True)
    if not shape.conv_channels:
        return state, None
    columns = row.flatten()[split:].view(shape.conv_dtype)
    conv = torch.zeros(
        (1, shape.conv_channels, shape.conv_columns), dtype=shape.conv_dtype, device=row.device
    )
    conv[0, :, 1:] = columns.view(shape.conv_channels, shape.conv_columns - 1)
    return state, conv


def _fits(tensor: torch.Tensor, size: int) -> bool:
    """Whether bytes can be viewed as elements of `size` bytes."""
    return (
        tensor.shape[-1] % size == 0
        and tensor.stride(-1) == 1
        and all(stride % size == 0 for stride in tensor.stride()[:-1])
        and tensor.storage_offset() % size == 0
        and tensor.data_ptr() % size == 0
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    return tensor.view(torch.uint8)
