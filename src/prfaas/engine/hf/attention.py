"""Attention of a chunk over the prefix before it, without a mask in memory (CUDA).

transformers describes every chunk but the first by a boolean mask, and under a mask no flash kernel
runs. That mask is always the same triangle, which torch can name instead of store:

    |1 1 1 1 0 0|
    |1 1 1 1 1 0|    lower right: the chunk's last token sees everything
    |1 1 1 1 1 1|

Windows keep their masks: they are short.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "prfaas_sdpa"


def without_stored_masks(model: Any) -> None:
    """Switches the model to `attend`. Models whose attention is not torch's SDPA (sinks, soft caps)
    stay unchanged."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask)
        model.set_attn_implementation(NAME)


def mask(**asked: Any) -> torch.Tensor | None:
    """transformers' mask, except where it would store the triangle above."""
    q_length, kv_length = asked["q_length"], asked["kv_length"]
    triangle = (
        asked.get("mask_function") is causal_mask_function
        and asked.get("attention_mask") is None
        and asked.get("local_size") is None
        and 1 < q_length < kv_length
        and asked.get("q_offset", 0) + q_length == asked.get("kv_offset", 0) + kv_length
    )
    if triangle:
        return causal_lower_right(q_length, kv_length)
    found: torch.Tensor | None = sdpa_mask(**asked)
    return found


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, CausalBias):
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **more
        )
        return found
    width = value.shape[-1]
    # MLA's values are narrower than its keys, and flash kernels need equal widths. Padding with
    # zeros, a quarter of the arithmetic, is still twice as fast as the kernel for unequal widths.
    padded = F.pad(value, (0, key.shape[-1] - width))
    output = F.scaled_dot_product_attention(
        query,
        key,
        padded,
        attn_mask=attention_mask,
        scale=more.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :width].transpose(1, 2).contiguous(), None
