"""Memory of an instance: what the weights leave for KV, and how many sequences fit."""

from __future__ import annotations

import math

from prfaas.errors import InputError
from prfaas.estimator.instance import Instance
from prfaas.estimator.work import kv_bytes

# Share of a GPU's memory that an engine uses for weights and KV. The defaults of vLLM (0.92) and
# SGLang are lower, but the paper's engine held the 1,015 GB of Ring-2.5-1T in the 1,128 GB of 8 x
# H200 with prompts of 131,072 tokens.
USABLE_SHARE = 0.95


def kv_bytes_available(instance: Instance) -> float:
    """Bytes that the weights leave for KV, on all GPUs together. Negative: the weights do not
    fit."""
    return instance.memory_bytes * USABLE_SHARE - instance.shape.weight_bytes


def sequence_bytes(instance: Instance, tokens: int) -> float:
    """KV bytes of one sequence on all GPUs together."""
    return kv_bytes(instance.spec, tokens, instance.domain_gpus)


def most_sequences(instance: Instance, tokens: int) -> int:
    """Sequences of `tokens` tokens that fit beside the weights."""
    return int(max(0.0, kv_bytes_available(instance)) // sequence_bytes(instance, tokens))


def require_fit(instance: Instance, tokens: int) -> None:
    """Raises unless the weights and one sequence of `tokens` tokens fit."""
    if most_sequences(instance, tokens) >= 1:
        return
    weights = instance.shape.weight_bytes
    one = sequence_bytes(instance, tokens)
    have = instance.memory_bytes * USABLE_SHARE
    least = math.ceil((weights + one) / (have / instance.gpus))
    raise InputError(
        f"{instance.title}: {weights / 1e9:,.0f} GB of weights and {one / 1e9:,.1f} GB of KV for "
        f"one sequence of {tokens:,} tokens do not fit into {have / 1e9:,.0f} GB "
        f"({USABLE_SHARE:.0%} of the memory)",
        fix=f"use at least {least} GPUs per instance, or weights of fewer bits ([model] weights)",
    )
