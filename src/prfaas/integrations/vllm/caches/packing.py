"""How the attention backend of a vLLM layer packs keys and values into a block.

Nothing in the tensor shows it: a backend that is not listed here is refused. On a CPU the packing
follows the machine's instructions, so vLLM's own operator writes a sample block, and the packing
that reads it back is taken.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

from prfaas.errors import InputError
from prfaas.integrations.canonical.packings import Packing, find_cpu_packing
from prfaas.integrations.vllm.caches.canonical_layout import USE_NATIVE

_CONTENT = {
    *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "FLEX_ATTENTION"),
    *("FLASHINFER", "ROCM_AITER_UNIFIED_ATTN", "HPC_ATTN"),
}
_LATENT = {
    *("FLASHMLA", "CUTLASS_MLA", "FLASHINFER_MLA", "TRITON_MLA", "FLASH_ATTN_MLA"),
    *("CPU_MLA", "AMX_MLA"),
}
_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def packing_of(name: str, layer: Any, spec: AttentionSpec) -> Packing:
    """InputError when the layer's blocks cannot be read."""
    backend = layer.attn_backend.get_name()
    if spec.state_content_bytes is None and spec.tokens_per_state == 1:
        if isinstance(spec, MLAAttentionSpec):
            if backend in _LATENT:
                return "mla"
        elif backend == "B12X":
            return "planes"
        elif spec.num_head_slots is not None:
            pass  # a packing of its own
        elif backend == "CPU_ATTN":
            cache_dtype = layer.kv_cache_dtype
            return cpu_packing(layer.isa, layer.dtype, cache_dtype, spec.block_size, spec.head_size)
        elif backend in _CONTENT and not (backend == "FLASH_ATTN" and current_platform.is_rocm()):
            return "content"
    raise InputError(
        f"layer {name}: the blocks of attention backend {backend} cannot be converted",
        fix=f"use another attention backend, or {USE_NATIVE}",
    )


def fp8_of(layer: Any) -> torch.dtype | None:
    """How the bytes of an fp8 cache are read; None for other caches."""
    return _FP8.get(getattr(layer, "kv_cache_dtype", "auto"))


@functools.cache
def cpu_packing(
    isa: str, dtype: torch.dtype, cache_dtype: str, block_tokens: int, head_size: int
) -> Packing:
    from vllm import _custom_ops as ops

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        blocks, heads = cache.shape[:2]
        into = cache.view(blocks, heads, 2 * block_tokens, head_size).chunk(2, dim=2)
        slots = torch.arange(block_tokens, 2 * block_tokens)
        ops.cpu_attn_reshape_and_cache(keys, values, *into, slots, isa, kv_cache_dtype=cache_dtype)

    fp8 = _FP8.get(cache_dtype)
    found = find_cpu_packing(write, dtype, block_tokens=block_tokens, dim=head_size, fp8=fp8)
    if found is None:
        raise InputError(
            f"vLLM packs blocks for {isa} in a way that cannot be converted", fix=USE_NATIVE
        )
    return found
