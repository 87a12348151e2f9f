"""Cache configurations as vLLM makes them, without starting an engine."""

from __future__ import annotations

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK_TOKENS = 128
WINDOW = 128
STATE_SHAPES = ((3, 320), (8, 32, 32))


def full(**changes: object) -> FullAttentionSpec:
    fields = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
    }
    return FullAttentionSpec(**{**fields, **changes})


def window(**changes: object) -> SlidingWindowSpec:
    fields = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
        "sliding_window": WINDOW,
    }
    return SlidingWindowSpec(**{**fields, **changes})


def state(mode: str = "none", **changes: object) -> MambaSpec:
    fields = {
        "block_size": BLOCK_TOKENS if mode == "align" else 8192,
        "shapes": STATE_SHAPES,
        "dtypes": (torch.float32, torch.float32),
        "page_size_padded": 65536,
        "mamba_cache_mode": mode,
    }
    return MambaSpec(**{**fields, **changes})


def config(*groups: tuple[KVCacheSpec, list[str]], num_blocks: int = 64) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for spec, names in groups],
    )


def falcon(mode: str = "none") -> KVCacheConfig:
    attention = [f"model.layers.{i}.attn" for i in range(2)]
    return config((full(), attention), (state(mode), ["model.4.mixer", "model.5.mixer"]))


def gemma() -> KVCacheConfig:
    return config((window(), ["l0"]), (window(), ["l1"]), (full(), ["l2"]))
