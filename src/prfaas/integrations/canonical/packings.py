"""What is inside a block of an engine's attention cache, as writable views of single tokens.

vLLM registers every attention cache as [kernel block, head slot, token, content], with any
strides. Backends differ in what they write into a block:

    content      keys, then values of each (token, head): FlashAttention, FlashInfer, Triton, Flex
    planes       head slot 0: keys of all heads, head slot 1: values (B12X)
    cpu_vec      per head: keys [dim, token], then values [token, dim]
    cpu_amx      per head: keys in tiles of 16 tokens x 2 dims, values of 16 dims x 2 tokens (bf16)
    cpu_bfmmla   per head: keys in tiles of 8 tokens x 4 dims, values of 2 dims x 4 tokens (bf16)
    mla          latent, then rope part of each token
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from prfaas.errors import InputError

Packing: TypeAlias = Literal["content", "planes", "cpu_vec", "cpu_amx", "cpu_bfmmla", "mla"]


@dataclass(frozen=True, slots=True)
class TokenView:
    """A view of a cache: [block, *token_factors, head, *dim_factors]. Its product of token factors
    is the number of tokens in a block, its product of dim factors the dimension of a head."""

    view: torch.Tensor
    token_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]


def token_views(
    cache: torch.Tensor, packing: Packing, k_dim: int, v_dim: int
) -> tuple[TokenView, TokenView]:
    """Keys and values of one layer, or latent and rope part for `mla`. Views: nothing is copied.
    InputError when the cache's shape is not that of the packing."""
    raise NotImplementedError
