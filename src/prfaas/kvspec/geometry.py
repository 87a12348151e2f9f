"""From a model's attention shapes to its KVSpec.

A geometry has what a paper or a `config.json` states: heads, dimensions, kernel sizes. Two dtypes
convert it into bytes: one for the attention cache and the convolution histories, one for recurrent
states, which engines keep in float32 even when the model runs in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from prfaas.errors import InputError
from prfaas.kvspec.groups import FullAttention, Group, KVSpec, LinearState, SlidingWindow

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def dtype_bytes(dtype: str) -> int:
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        known = ", ".join(DTYPE_BYTES)
        raise InputError(f"unknown dtype {dtype!r}", fix=f"use one of: {known}") from None


@dataclass(frozen=True, slots=True)
class GQA:
    """Grouped-query attention; MHA and MQA are its two extremes."""

    layers: tuple[int, ...]
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class WindowedGQA:
    """Grouped-query attention over the last `window` tokens."""

    layers: tuple[int, ...]
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention, cached compressed: one latent and one rope key per token."""

    layers: tuple[int, ...]
    kv_lora_rank: int
    rope_dim: int
    indexer_bytes: int = 0  # per token: the keys of a sparse-attention indexer


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear-attention or state-space layer with its short convolution.

    KDA: k_heads = v_heads. Gated delta net: fewer key than value heads. Mamba-2: k_heads = groups,
    k_dim = state size, v_dim = head dim. Lightning: conv_kernel = 1, which means no history.
    """

    layers: tuple[int, ...]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int

    @property
    def state_elements(self) -> int:
        return self.v_heads * self.k_dim * self.v_dim

    @property
    def conv_elements(self) -> int:
        """Kernel - 1 past columns of the convolved queries, keys (or B, C) and values."""
        channels = 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        return channels * (self.conv_kernel - 1)


Geometry: TypeAlias = GQA | WindowedGQA | MLA | Linear


def build_spec(
    geometries: Iterable[Geometry], *, kv_dtype: str = "bfloat16", state_dtype: str = "float32"
) -> KVSpec:
    """Group names are kind and ordinal (`full0`, `window0`, `linear0`), the same on every host."""
    kv, state = dtype_bytes(kv_dtype), dtype_bytes(state_dtype)
    groups: list[Group] = []

    def name(kind: str) -> str:
        return f"{kind}{sum(group.name.startswith(kind) for group in groups)}"

    for g in geometries:
        match g:
            case GQA():
                per_token = g.kv_heads * (g.k_dim + g.v_dim) * kv
                groups.append(FullAttention(name("full"), g.layers, per_token, g.kv_heads))
            case MLA():
                per_token = (g.kv_lora_rank + g.rope_dim) * kv + g.indexer_bytes
                groups.append(FullAttention(name("full"), g.layers, per_token))
            case WindowedGQA():
                per_token = g.kv_heads * (g.k_dim + g.v_dim) * kv
                groups.append(
                    SlidingWindow(name("window"), g.layers, per_token, g.window, g.kv_heads)
                )
            case Linear():
                nbytes = g.state_elements * state + g.conv_elements * kv
                groups.append(LinearState(name("linear"), g.layers, nbytes, g.v_heads))
    return KVSpec(tuple(groups))
