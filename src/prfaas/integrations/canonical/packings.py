"""What is inside a block of an engine's attention cache, as writable views of single tokens.

vLLM registers every attention cache as [kernel block, head slot, token, content], with any
strides. Backends differ in what they write into a block:

    content      keys, then values of each (token, head): FlashAttention, FlashInfer, Triton, Flex
    planes       head slot 0: keys of all heads, head slot 1: values (B12X)
    cpu_vec      per head: keys [dim, token], then values [token, dim]
    cpu_amx      per head: keys in tiles of 16 tokens x 2 dims, values of 16 dims x 2 tokens (bf16)
    cpu_bfmmla   per head: keys in tiles of 8 tokens x 4 dims, values of 8 dims x 4 tokens (bf16)
    mla          latent, then rope part of each token
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from prfaas.errors import InputError

Packing: TypeAlias = Literal["content", "planes", "cpu_vec", "cpu_amx", "cpu_bfmmla", "mla"]


_CPU_TILES = {"cpu_vec": (1, 1), "cpu_amx": (16, 16), "cpu_bfmmla": (8, 8)}  # tokens, dims


@dataclass(frozen=True, slots=True)
class TokenView:
    """A view of a cache: [block, *token_factors, head, *dim_factors]. The product of the token
    factors is the number of tokens in a block, that of the dim factors the dimension of a head."""

    view: torch.Tensor
    token_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]

    @property
    def heads(self) -> int:
        return int(self.view.shape[1 + len(self.token_factors)])

    @property
    def dim(self) -> int:
        return math.prod(self.dim_factors)

    def in_halves(self) -> TokenView:
        """The same elements in another order: native (x0, y0, x1, y1, ...), viewed as
        (x0, x1, ..., y0, y1, ...). For a rope part with one dim factor."""
        (dim,) = self.dim_factors
        if dim % 2:
            raise InputError(
                f"a rope part of {dim} dims has no pairs",
                where="rope_pairs",
                fix="use rope_pairs only for an even number of dims",
            )
        pairs = self.view.unflatten(-1, (dim // 2, 2))
        return TokenView(pairs.transpose(-1, -2), self.token_factors, (2, dim // 2))


def token_views(
    cache: torch.Tensor, packing: Packing, k_dim: int, v_dim: int
) -> tuple[TokenView, TokenView]:
    """Keys and values of one layer, or latent and rope part for `mla`. Views: nothing is copied.
    InputError when the cache's shape is not that of the packing."""
    if packing == "mla" and cache.dim() == 3:
        cache = cache.unsqueeze(1)  # vLLM's layers see [block, token, content]
    if cache.dim() != 4:
        raise _misfit(cache, packing, "has not the four axes [block, head slot, token, content]")
    if not cache.numel() or min(k_dim, v_dim) < 1:
        raise _misfit(cache, packing, f"has no element, or dims of {k_dim} and {v_dim}")
    blocks, slots, tokens, content = cache.shape
    if packing == "content" or packing == "mla":
        if content != k_dim + v_dim:
            raise _misfit(cache, packing, f"does not have {k_dim} + {v_dim} elements per token")
        if packing == "mla" and slots != 1:
            raise _misfit(cache, packing, "has more than one head slot")
        rows = cache.transpose(1, 2)
        return (
            TokenView(rows[..., :k_dim], (tokens,), (k_dim,)),
            TokenView(rows[..., k_dim:], (tokens,), (v_dim,)),
        )
    if k_dim != v_dim:
        raise _misfit(cache, packing, f"needs equal dims, not {k_dim} and {v_dim}")
    if packing == "planes":
        if slots != 2 or content % k_dim:
            raise _misfit(cache, packing, f"does not have two planes of heads with {k_dim} dims")
        planes = cache.unflatten(-1, (content // k_dim, k_dim))
        return (
            TokenView(planes[:, 0], (tokens,), (k_dim,)),
            TokenView(planes[:, 1], (tokens,), (v_dim,)),
        )
    if packing not in _CPU_TILES:
        raise InputError(
            f"{packing!r} is not a packing",
            where="packing",
            fix="use one of: content, planes, cpu_vec, cpu_amx, cpu_bfmmla, mla",
        )
    token_tile, dim_tile = _CPU_TILES[packing]
    if content != 2 * k_dim or tokens % token_tile or k_dim % dim_tile:
        raise _misfit(
            cache, packing, f"does not divide into tiles of {token_tile} tokens x {dim_tile} dims"
        )
    if not cache[0, 0].is_contiguous():
        raise _misfit(cache, packing, f"has strides {cache.stride()} inside a head")
    return _cpu_views(cache, packing, k_dim)


def find_cpu_packing(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    dtype: torch.dtype,
    *,
    block_tokens: int,
    dim: int,
    fp8: torch.dtype | None = None,
) -> Packing | None:
    """Which packing a CPU engine writes, seen from what it writes: its build decides as well as its
    instruction set. `write` puts keys and values [token, head, dim] of `dtype` into block 1 of a
    cache [block, head, token, content] with the engine's own operation. An fp8 cache (`fp8`) is
    written with scales of 1. None when the result is none of the known packings."""
    generator = torch.Generator().manual_seed(1)
    sizes = (block_tokens, 2, dim)
    # Small integers are exact in every data type.
    keys, values = (torch.randint(-7, 8, sizes, generator=generator).to(dtype) for _ in range(2))
    cache = torch.zeros((2, 2, block_tokens, 2 * dim), dtype=torch.uint8 if fp8 else dtype)
    write(keys, values, cache)
    stored = cache if fp8 is None else cache.view(fp8).to(dtype)
    candidates: tuple[Packing, ...] = ("cpu_vec", "cpu_amx", "cpu_bfmmla")
    for packing in candidates:
        try:
            views = token_views(stored, packing, dim, dim)
        except InputError:
            continue  # the block does not divide into this packing's tiles
        if all(
            torch.equal(view.view[1].flatten(), rows.flatten())
            for view, rows in zip(views, (keys, values), strict=True)
        ):
            return packing
    return None


def joint_view(
    cache: torch.Tensor, packing: Packing, k_dim: int, v_dim: int
) -> torch.Tensor | None:
    """A view [block, token, part, ...] whose elements are in the order of a rank's own rows (all
    keys of a token, then all values), or None where no single view is. Its elements are integers as
    wide as the strides allow: for copies only."""
    if packing == "mla":
        rows = cache.unsqueeze(2) if cache.dim() == 3 else cache.transpose(1, 2)
    elif packing == "content" and k_dim == v_dim:
        rows = cache.transpose(1, 2).unflatten(-1, (2, k_dim)).transpose(2, 3)
    elif packing == "planes":
        rows = cache.unflatten(-1, (-1, k_dim)).transpose(1, 2)
    else:
        return None
    if rows.stride(-1) != 1:
        return None
    for dtype in (torch.int64, torch.int32, torch.int16):
        steps = (*rows.stride()[:-1], rows.shape[-1], rows.storage_offset())
        is_aligned = rows.data_ptr() % dtype.itemsize == 0
        if is_aligned and all(step * rows.element_size() % dtype.itemsize == 0 for step in steps):
            return rows.view(dtype)
    return rows.view(torch.uint8)


def _cpu_views(cache: torch.Tensor, packing: Packing, d: int) -> tuple[TokenView, TokenView]:
    b, h, n, _ = cache.shape
    # Per head one box of 2n x d numbers: all keys, then all values, each packed for the matrix
    # instructions. Only the last two axes are merged, so the strides of blocks and heads are free.
    box = cache.flatten(2)
    keys, values = box[..., : n * d], box[..., n * d :]
    if packing == "cpu_vec":
        k = keys.unflatten(2, (d, n)).permute(0, 3, 1, 2)
        v = values.unflatten(2, (n, d)).permute(0, 2, 1, 3)
        return TokenView(k, (n,), (d,)), TokenView(v, (n,), (d,))
    if packing == "cpu_amx":
        k = keys.unflatten(2, (n // 16, d // 2, 16, 2)).permute(0, 2, 4, 1, 3, 5)
        v = values.unflatten(2, (d // 16, n // 2, 16, 2)).permute(0, 3, 5, 1, 2, 4)
        return TokenView(k, (n // 16, 16), (d // 2, 2)), TokenView(v, (n // 2, 2), (d // 16, 16))
    k = keys.unflatten(2, (n // 8, d // 4, 8, 4)).permute(0, 2, 4, 1, 3, 5)
    v = values.unflatten(2, (d // 8, n // 4, 8, 4)).permute(0, 3, 5, 1, 2, 4)
    return TokenView(k, (n // 8, 8), (d // 4, 4)), TokenView(v, (n // 4, 4), (d // 8, 8))


def _misfit(cache: torch.Tensor, packing: Packing, problem: str) -> InputError:
    return InputError(
        f"a cache of shape {tuple(cache.shape)} {problem}, as the packing {packing!r} requires",
        where="packing",
        fix="use another attention backend, or the native form",
    )
