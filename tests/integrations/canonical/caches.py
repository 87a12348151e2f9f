"""Engines' caches made by formula, element by element, and pages that cut rows anywhere."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from prfaas.device import PagePins
from prfaas.integrations.canonical.packings import Packing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKEN_TILE = {"cpu_amx": 16, "cpu_bfmmla": 8}  # a block holds a multiple of these


@dataclass(frozen=True)
class Shape:
    """Of one rank's cache."""

    packing: Packing
    kernel_blocks: int
    heads: int
    tokens: int  # in a kernel block
    k_dim: int
    v_dim: int
    order: str = "HND"  # or NHD, or a layer inside of a packed block


def empty_cache(shape: Shape, dtype: torch.dtype, fill: float = float("nan")) -> torch.Tensor:
    """[kernel block, head slot, token, content] with the strides of the order, full of NaN."""
    b, h, n = shape.kernel_blocks, shape.heads, shape.tokens
    if shape.packing == "planes":
        h, content = 2, shape.heads * shape.k_dim
    else:
        content = shape.k_dim + shape.v_dim

    def full(*sizes: int) -> torch.Tensor:
        wide = torch.full(sizes, fill) if dtype.itemsize > 1 else torch.full(sizes, 0x7F)
        return wide.to(dtype)

    if shape.order == "NHD":
        return full(b, n, h, content).transpose(1, 2)
    if shape.order == "packed":
        return full(b, 3, h, n, content)[:, 1]
    if shape.order == "packed NHD":
        return full(b, 3, n, h, content)[:, 1].transpose(1, 2)
    return full(b, h, n, content)


def key_place(packing: Packing, n: int, d: int, t: int, i: int) -> int:
    """The place of dim i of the key of token t in the box of 2 * n * d numbers of a head."""
    if packing == "cpu_vec":
        return i * n + t
    if packing == "cpu_amx":
        return ((t // 16 * (d // 2) + i // 2) * 16 + t % 16) * 2 + i % 2
    assert packing == "cpu_bfmmla"
    return ((t // 8 * (d // 4) + i // 4) * 8 + t % 8) * 4 + i % 4


def value_place(packing: Packing, n: int, d: int, t: int, i: int) -> int:
    if packing == "cpu_vec":
        return n * d + t * d + i
    if packing == "cpu_amx":
        return n * d + ((i // 16 * (n // 2) + t // 2) * 16 + i % 16) * 2 + t % 2
    assert packing == "cpu_bfmmla"
    return n * d + ((i // 8 * (n // 4) + t // 4) * 8 + i % 8) * 4 + t % 4


@functools.cache
def places(packing: Packing, n: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[token, dim] of keys and of values."""
    keys = [[key_place(packing, n, d, t, i) for i in range(d)] for t in range(n)]
    values = [[value_place(packing, n, d, t, i) for i in range(d)] for t in range(n)]
    return torch.tensor(keys), torch.tensor(values)


def put_tokens(
    cache: torch.Tensor,
    shape: Shape,
    kernel_blocks: Sequence[int],
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Writes keys [token, head, k_dim] and values [token, head, v_dim] by the formulas. `first` is
    counted from the first token of the first kernel block."""
    if not len(keys):
        return
    at = torch.arange(first, first + len(keys))
    blocks, t = torch.tensor(kernel_blocks)[at // shape.tokens], at % shape.tokens
    keys, values = keys.to(cache.dtype), values.to(cache.dtype)
    if shape.packing in ("content", "mla"):
        cache[blocks, :, t] = torch.cat((keys, values), dim=2)
    elif shape.packing == "planes":
        cache[blocks, 0, t] = keys.flatten(1)
        cache[blocks, 1, t] = values.flatten(1)
    else:
        boxes = cache.flatten(2)
        assert boxes.data_ptr() == cache.data_ptr()  # a view
        heads = torch.arange(shape.heads)[None, :, None]
        for place, rows in zip(
            places(shape.packing, shape.tokens, shape.k_dim), (keys, values), strict=True
        ):
            boxes[blocks[:, None, None], heads, place[t][:, None, :]] = rows


class Pages:
    """Memory of a segment in one mapping, cut at the given places, with guard bytes around each
    page."""

    GUARD = 0xA5

    def __init__(self, nbytes: int, cuts: Sequence[int], shift: int = 0) -> None:
        edges = [0, *sorted({cut for cut in cuts if 0 < cut < nbytes}), nbytes]
        sizes = [last - first for first, last in zip(edges, edges[1:], strict=False)]
        self._memory = mmap.mmap(-1, nbytes + 128 * len(sizes) + 128)
        self._memory[:] = bytes([self.GUARD]) * len(self._memory)
        self.views: list[memoryview] = []
        self._guards: list[slice] = []
        at = 0
        for size in sizes:
            begin = at + 64 + shift
            self.views.append(memoryview(self._memory)[begin : begin + size])
            self._guards.append(slice(at, begin))
            at = begin + size
            at += -at % 8  # rows begin at aligned places, but for the shift
        self._guards.append(slice(at, len(self._memory)))

    @property
    def content(self) -> bytes:
        return b"".join(self.views)

    @content.setter
    def content(self, data: bytes) -> None:
        at = 0
        for view in self.views:
            view[:] = data[at : at + len(view)]
            at += len(view)

    def fill(self, byte: int) -> None:
        self.content = bytes([byte]) * sum(len(view) for view in self.views)

    def guards_are_whole(self) -> bool:
        return all(set(self._memory[guard]) <= {self.GUARD} for guard in self._guards)


class HostPins(PagePins):
    """Registers nothing, and notes what it would register."""

    def __init__(self, part_bytes: int = 512) -> None:
        super().__init__("cpu", part_bytes=part_bytes)
        self.registered: dict[int, int] = {}
        self.refuses = False

    def _register(self, address: int, nbytes: int) -> int:
        assert address not in self.registered
        if self.refuses:
            return 1
        self.registered[address] = nbytes
        return 0

    def _unregister(self, address: int) -> None:
        del self.registered[address]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def rows_of(
    keys: torch.Tensor, values: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]
) -> bytes:
    """Canonical bytes of keys [token, head, dim] and values."""
    return b"".join(raw(cast(k)) + raw(cast(v)) for k, v in zip(keys, values, strict=True))
