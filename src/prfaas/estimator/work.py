"""Counts the work of a prefill and of a decode step. Pure arithmetic on the model's shape.

Work is counted for the whole instance; `times` divides it among the GPUs. A multiply-add counts as
two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.catalog.shape import BYTES_PER_WEIGHT, AttentionWork, ModelShape
from prfaas.kvspec import KVSpec


@dataclass(frozen=True, slots=True)
class Work:
    common_flops: float  # products with matrices that every token passes
    expert_flops: float  # products with routed experts
    attention_flops: float  # products of queries with keys and values, and updates of states
    weight_bytes: float  # weights that are read, once per pass
    cache_bytes: float  # KV and states that are read and written
    hidden_elements: float  # tokens x layers x hidden size: what passes between kernels and GPUs
    passes: int  # times that the layers run: chunks of a prefill, or one decode step
    layers: int


def prefill_work(shape: ModelShape, spec: KVSpec, new: int, cached: int, chunk_tokens: int) -> Work:
    """The work of `new` tokens after a prefix of `cached` tokens, in chunks of `chunk_tokens`."""
    passes = max(1, -(-new // chunk_tokens))
    attention = sum(
        2.0 * kind.layers * _prefill_macs(kind, new, cached) for kind in shape.attention
    )
    # Each chunk reads the KV before it again.
    before = sum(cached + chunk_tokens * index for index in range(passes))
    cache = spec.kv_bytes(new, 0) + passes * spec.state_bytes + before * spec.bytes_per_token
    return Work(
        common_flops=2.0 * new * shape.common_elements,
        expert_flops=2.0 * new * shape.routed_elements,
        attention_flops=attention,
        weight_bytes=passes * _weight_bytes_read(shape, min(new, chunk_tokens)),
        cache_bytes=float(cache),
        hidden_elements=float(new) * shape.layers * shape.hidden,
        passes=passes,
        layers=shape.layers,
    )


def decode_work(shape: ModelShape, spec: KVSpec, batch: int, context: int) -> Work:
    """The work of one step that decodes one token of each of `batch` sequences of `context`
    tokens."""
    attention = sum(
        2.0 * kind.layers * (_decode_macs(kind, context) + kind.state_macs)
        for kind in shape.attention
    )
    output = shape.hidden * shape.vocabulary
    return Work(
        common_flops=2.0 * batch * (shape.common_elements + output),
        expert_flops=2.0 * batch * shape.routed_elements,
        attention_flops=batch * attention,
        weight_bytes=_weight_bytes_read(shape, batch) + output * BYTES_PER_WEIGHT["bf16"],
        cache_bytes=float(batch) * (_decode_cache_bytes(shape, spec, context) + spec.state_bytes),
        hidden_elements=float(batch) * shape.layers * shape.hidden,
        passes=1,
        layers=shape.layers,
    )


def _prefill_macs(kind: AttentionWork, new: int, cached: int) -> float:
    """Multiply-adds of one layer."""
    pairs = new * cached + new * (new + 1) / 2
    within = pairs if kind.reach is None else _pairs_within(new, cached, kind.reach)
    return kind.prefill_macs * within + kind.index_macs * pairs + kind.state_macs * new


def _pairs_within(new: int, cached: int, reach: int) -> float:
    """Pairs of tokens of which the first attends to the second, at most `reach` per token."""
    growing = min(max(reach - cached, 0), new)  # tokens with fewer than `reach` before them
    return growing * cached + growing * (growing + 1) / 2 + (new - growing) * reach


def _decode_macs(kind: AttentionWork, context: int) -> float:
    within = context if kind.reach is None else min(context, kind.reach)
    return kind.decode_macs * within + kind.index_macs * context


def _decode_cache_bytes(shape: ModelShape, spec: KVSpec, context: int) -> float:
    """KV that a decode step reads. Sparse attention reads what it selected, and all index keys;
    the difference between the two is not counted apart."""
    tokens = context
    reaches = [kind.reach for kind in shape.attention if kind.kind == "latent"]
    if reaches and all(reach is not None for reach in reaches):
        tokens = min(context, max(reach for reach in reaches if reach is not None))
    return float(spec.kv_bytes(tokens)) if tokens else 0.0


def _weight_bytes_read(shape: ModelShape, tokens: int) -> float:
    """Weights that one pass of `tokens` tokens reads: of the experts only those that are used."""
    common = shape.common_elements * BYTES_PER_WEIGHT[shape.weights]
    if shape.experts is None:
        return common
    used = shape.experts.layers * shape.experts_read(tokens) * shape.expert_elements
    return common + used * BYTES_PER_WEIGHT[shape.expert_weights]
