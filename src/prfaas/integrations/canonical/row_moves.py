"""Rows of several layers, from their caches into staging and back: all layers with one launch.

Staging has the order of a kvd's arena, where a unit (a block of tokens) holds all layers:

    unit 0 | layer 0: rows of its tokens | layer 1: rows of its tokens | ...
    unit 1 | layer 0 ...

so that a unit's rows of neighbouring layers cross the bus as one piece. Where Triton is installed,
a GPU copies bit by bit with the kernels of `kernels.py`. Elsewhere, and where a cast changes the
bytes, plain torch does the same, layer after layer.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from prfaas.device.row_pages import RowShape
from prfaas.errors import EngineError
from prfaas.integrations.canonical.casts import Cast

_LOG = logging.getLogger(__name__)
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_FAMILIES: dict[object, int] = {}

# The numbers as a tensor on the device of staging.
Indices = Callable[[Sequence[int]], torch.Tensor]


class Tokens(NamedTuple):
    """Tokens [start, stop) of a sequence, and the blocks that hold them."""

    first: int  # of the first block, [first, end): whole kernel blocks
    end: int
    start: int
    stop: int
    unit: int  # tokens in a unit of staging; units begin at multiples of it

    def staged_rows(self, layer: int, layers: int) -> torch.Tensor:
        """The place in staging of each token's row."""
        t = torch.arange(self.start, self.stop)
        low = (t // self.unit * self.unit).clamp(min=self.start)
        high = (t // self.unit * self.unit + self.unit).clamp(max=self.stop)
        return layers * (low - self.start) + layer * (high - low) + (t - low)


class RowPart(NamedTuple):
    """One part of a layer's rows: where it is in the cache, and where in the rank's own row."""

    view: torch.Tensor  # [kernel block, *token_factors, ...]
    token_factors: tuple[int, ...]
    cast: Cast
    at: int  # bytes

    @property
    def nbytes(self) -> int:
        inner = self.view.shape[1 + len(self.token_factors) :]
        return math.prod(inner) * self.cast.wire.itemsize

    def of(self, rows: torch.Tensor, blocks: int) -> torch.Tensor:
        """The part of uint8 rows [blocks * tokens, own bytes], in the shape of `view`."""
        part = rows[:, self.at : self.at + self.nbytes].view(self.cast.wire)
        inner = self.view.shape[1 + len(self.token_factors) :]
        shaped: torch.Tensor
        shaped = part.unflatten(0, (blocks, *self.token_factors)).unflatten(-1, inner)
        return shaped


@dataclass(frozen=True, slots=True)
class PartLayout:
    """A part as the kernels see it. Everything counts elements of `dtype`. Layers whose layouts are
    equal can be copied together."""

    dtype: torch.dtype
    block_tokens: int
    block_stride: int
    token_stride: int
    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]
    row: int  # from one row of staging to the next
    at: int  # in a row


class LayerRows:
    """The rows of one layer, of the columns of one rank."""

    def __init__(self, parts: Sequence[RowPart], shape: RowShape, ratio: int) -> None:
        """`ratio`: kernel blocks in a manager block."""
        self.parts = tuple(parts)
        self.shape = shape
        self.ratio = ratio
        self.kernel_tokens = math.prod(self.parts[0].token_factors)
        self.num_blocks = self.parts[0].view.shape[0] // ratio
        self.layouts = tuple(_layout(part, shape.own_bytes) for part in self.parts)
        self.addresses = tuple(part.view.data_ptr() for part in self.parts)
        key = (self.layouts, shape, ratio, self.num_blocks, self.kernel_tokens)
        # Equal for layers that can be copied together. A number, because it is compared often.
        self.family = _FAMILIES.setdefault(key, len(_FAMILIES))

    @property
    def block_tokens(self) -> int:
        """Tokens in a manager block."""
        return self.kernel_tokens * self.ratio

    def gather(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Whole blocks into rows."""
        for part in self.parts:
            part.cast.to_wire(part.of(rows, len(blocks)), part.view.index_select(0, blocks))

    def scatter(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        for part in self.parts:
            source = part.of(rows, len(blocks))
            if part.cast.plain:
                part.view.index_copy_(0, blocks, source)
                continue
            stored = torch.empty(source.shape, dtype=part.cast.stored, device=source.device)
            part.cast.from_wire(stored, source)
            part.view.index_copy_(0, blocks, stored)


def gather_rows(
    layers: Sequence[LayerRows],
    blocks: Sequence[int],
    tokens: Tokens,
    staged: torch.Tensor,
    indices: Indices,
) -> None:
    """Queues the copy of the tokens' rows into `staged` (uint8, flat) on the current stream.
    `blocks` are kernel blocks. The layers are of one family."""
    _copy_rows(layers, blocks, tokens, staged, indices, load=False)


def scatter_rows(
    layers: Sequence[LayerRows],
    blocks: Sequence[int],
    tokens: Tokens,
    staged: torch.Tensor,
    indices: Indices,
) -> None:
    """The reverse. Rows of the blocks outside of [start, stop) become zero."""
    _copy_rows(layers, blocks, tokens, staged, indices, load=True)


def _copy_rows(
    layers: Sequence[LayerRows],
    blocks: Sequence[int],
    tokens: Tokens,
    staged: torch.Tensor,
    indices: Indices,
    *,
    load: bool,
) -> None:
    if _by_kernel(layers, blocks, tokens, staged, indices, load=load):
        return
    index = indices(blocks)
    rows = staged.view(-1, layers[0].shape.own_bytes)
    for number, layer in enumerate(layers):
        copy = layer.scatter if load else layer.gather
        if len(layers) == 1 and tokens[:2] == tokens[2:4]:
            copy(index, rows)
            continue
        sizes = (tokens.end - tokens.first, rows.shape[1])
        make = torch.zeros if load else torch.empty
        whole = make(sizes, dtype=torch.uint8, device=rows.device)
        own = whole[tokens.start - tokens.first : tokens.stop - tokens.first]
        places = indices(tokens.staged_rows(number, len(layers)).tolist())
        if load:
            own.copy_(rows.index_select(0, places))
        copy(index, whole)
        if not load:
            rows.index_copy_(0, places, own)


def _by_kernel(
    layers: Sequence[LayerRows],
    blocks: Sequence[int],
    tokens: Tokens,
    staged: torch.Tensor,
    indices: Indices,
    *,
    load: bool,
) -> bool:
    """False where the kernels cannot copy these layers."""
    copy_part = _copy_part() if staged.is_cuda else None
    layouts = layers[0].layouts
    if copy_part is None or None in layouts:
        return False
    if any(layer.family != layers[0].family for layer in layers[1:]):
        raise EngineError("layers of different families cannot be copied together")
    index = indices(blocks)
    for number, layout in enumerate(layouts):
        assert layout is not None
        bases = indices([layer.addresses[number] for layer in layers])
        copy_part(layout, bases, index, staged.view(layout.dtype), tokens, load=load)
    return True


@functools.cache
def _copy_part() -> Callable[..., Any] | None:
    try:
        kernels: Any = importlib.import_module("prfaas.integrations.canonical.kernels")
    except ImportError as error:
        _LOG.warning("caches are converted with plain torch, which is slower: %s", error)
        return None
    function: Callable[..., Any] = kernels.copy_part
    return function


def _layout(part: RowPart, own_bytes: int) -> PartLayout | None:
    """None where the part is not copied bit by bit, or has more axes than the kernels."""
    if not part.cast.plain or len(part.token_factors) != 1:
        return None
    view = part.view
    (tokens,) = part.token_factors
    sizes, strides = _merged(view.shape[2:], view.stride()[2:])
    if len(sizes) > 3:
        return None
    size = view.element_size()
    wide = 8 if strides[-1] == 1 else size
    token_stride = view.stride(1) if tokens > 1 else 0
    steps = [step * size for step in (view.stride(0), token_stride, *strides[:-1], sizes[-1])]
    while any(step % wide for step in (*steps, own_bytes, part.at, view.data_ptr())):
        wide //= 2
    if wide < size:
        return None
    times = wide // size
    missing = 3 - len(sizes)
    sizes = (1,) * missing + (*sizes[:-1], sizes[-1] // times)
    strides = (0,) * missing + (*(step // times for step in strides[:-1]), strides[-1])
    return PartLayout(
        _INTEGERS[wide],
        tokens,
        view.stride(0) // times,
        token_stride // times,
        (sizes[0], sizes[1], sizes[2]),
        (strides[0], strides[1], strides[2]),
        own_bytes // wide,
        part.at // wide,
    )


def _merged(
    sizes: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in the same order, with as few axes as possible and at least one."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    found = found or [(1, 1)]
    return tuple(size for size, _ in found), tuple(stride for _, stride in found)
