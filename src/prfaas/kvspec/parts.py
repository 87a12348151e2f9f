"""The tensors that the bytes of one layer consist of, in the order of the canonical wire form.

    geometry            one token                              one linear state
    GQA, WindowedGQA    keys [head, k_dim], values [head, v_dim]
    MLA                 latent [rank], rope [rope_dim]
    Linear                                                     state [head, k_dim * v_dim],
                                                               conv [channel, kernel - 1]

Every array is in C order, and the parts follow each other without padding. Heads and channels are
those of the whole model, whatever the number of ranks that write them. Convolution columns are
ordered from the oldest to the newest; a linear layer whose kernel is 1 has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from prfaas.errors import InputError
from prfaas.kvspec.geometry import GQA, MLA, Geometry, Linear, WindowedGQA, dtype_bytes

PartRole: TypeAlias = Literal["keys", "values", "latent", "rope", "state", "conv"]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of one token, or of one linear state."""

    role: PartRole
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_bytes(self.dtype)


def layer_parts(geometry: Geometry, *, kv_dtype: str, state_dtype: str) -> tuple[Part, ...]:
    """Their bytes add up to `bytes_per_token` or `state_bytes` of the group that `build_spec` makes
    of the geometry. InputError when the layer has bytes that the canonical form does not
    describe, or a dtype is unknown."""
    for dtype in (kv_dtype, state_dtype):
        dtype_bytes(dtype)
    match geometry:
        case GQA() | WindowedGQA():
            return (
                Part("keys", (geometry.kv_heads, geometry.k_dim), kv_dtype),
                Part("values", (geometry.kv_heads, geometry.v_dim), kv_dtype),
            )
        case MLA():
            if geometry.indexer_bytes:
                raise InputError(
                    f"the keys of a sparse-attention indexer ({geometry.indexer_bytes} bytes per "
                    "token) have no canonical form",
                    where="indexer_bytes",
                    fix="use the engine's native form for this model, between equal engines",
                )
            return (
                Part("latent", (geometry.kv_lora_rank,), kv_dtype),
                Part("rope", (geometry.rope_dim,), kv_dtype),
            )
        case Linear():
            state = Part("state", (geometry.v_heads, geometry.k_dim * geometry.v_dim), state_dtype)
            columns = geometry.conv_kernel - 1
            if not columns:
                return (state,)
            channels = geometry.conv_elements // columns
            return (state, Part("conv", (channels, columns), kv_dtype))
