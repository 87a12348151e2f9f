"""Whole blocks as rows: the bytes of a block in the order in which they are in memory.

Engines that are equal in everything exchange blocks so, without a conversion. One block is one row,
as a state is, and the block's only token in the terms of `row_moves.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prfaas.device.row_pages import Column, RowShape
from prfaas.errors import InputError
from prfaas.integrations.canonical.block_copies import widened
from prfaas.integrations.canonical.casts import Cast
from prfaas.integrations.canonical.row_moves import LayerRows, RowPart


def blocks_of(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """One layer's cache as [block, byte], without copying. Layers share storage, so the stride
    between blocks may be longer than a block; an engine may also count in smaller kernel blocks.
    The axes of a block may be in any order, as long as its bytes follow each other."""
    if num_blocks < 1 or not cache.numel():
        raise InputError(
            f"a cache of shape {tuple(cache.shape)} has no {num_blocks} blocks with bytes",
            where="num_gpu_blocks",
            fix="give the cache of a layer, and its number of blocks",
        )
    rows, rest = divmod(cache.shape[0], num_blocks)
    row_bytes = cache[0].numel() * cache.element_size()
    stride_bytes = cache.stride(0) * cache.element_size()
    is_dense = _is_dense(cache.shape[1:], cache.stride()[1:])
    if rest or not is_dense or (rows > 1 and row_bytes != stride_bytes):
        raise InputError(
            f"a cache of shape {tuple(cache.shape)} and strides {cache.stride()} does not divide "
            f"into {num_blocks} contiguous blocks",
            fix="use an attention backend whose blocks are contiguous",
        )
    storage = torch.empty(0, dtype=torch.uint8, device=cache.device)
    storage.set_(cache.untyped_storage())
    start = cache.storage_offset() * cache.element_size()
    return storage.as_strided((num_blocks, rows * row_bytes), (rows * stride_bytes, 1), start)


def block_rows(blocks: torch.Tensor) -> LayerRows:
    """`blocks` as `blocks_of` returns them."""
    nbytes = blocks.shape[1]
    view = widened(blocks).unsqueeze(1)
    part = RowPart(view, (1,), Cast(view.dtype, view.dtype), 0)
    return LayerRows([part], RowShape(nbytes, nbytes, (Column(range(nbytes), 0),)), 1)


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """The elements fill a range of memory, whatever the order of the axes."""
    step = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True
