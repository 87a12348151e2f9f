"""Counts the work of a prefill and of a decode step. Pure arithmetic on the model's shape.

Work is counted for all GPUs of one tensor-parallel group together; `times` divides it among them.
A multiply-add counts as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.catalog.shape import BYTES_PER_WEIGHT, AttentionWork, ModelShape
from prfaas.kvspec import FullAttention, KVSpec, SlidingWindow


@dataclass(frozen=True, slots=True)
class Work:
    common_flops: float  # products with matrices that every token passes
    expert_flops: float  # products with routed experts
    attention_flops: float  # products of queries with keys and values, and updates of states
    weight_bytes: float  # weights that are read, once per pass
    cache_bytes: float  # KV and states that are read and written
    routed_elements: float  # hidden elements that are copied to experts and back
    hidden_elements: float  # tokens x layers x hidden size: what GPUs exchange


def prefill_work(
    shape: ModelShape,
    spec: KVSpec,
    new: int,
    cached: int,
    chunk_tokens: int,
    tensor: float = 1,
    packed: bool = False,
) -> Work:
    """The work of `new` tokens after a prefix of `cached` tokens, in chunks of `chunk_tokens`, on
    `tensor` GPUs. `packed`: other prompts fill the rest of the chunk, and share its weights."""
    chunks = max(1, -(-new // chunk_tokens))
    passes = new / chunk_tokens if packed else float(chunks)
    attention = sum(
        2.0 * kind.layers * _prefill_macs(kind, new, cached) for kind in shape.attention
    )
    # Each chunk reads the KV before it again.
    before = sum(cached + chunk_tokens * index for index in range(chunks))
    cache = kv_bytes(spec, new, tensor) + chunks * spec.state_bytes
    cache += before * growing_bytes(spec, tensor)
    return Work(
        common_flops=2.0 * new * shape.common_elements,
        expert_flops=2.0 * new * shape.routed_elements,
        attention_flops=attention,
        weight_bytes=passes * _weight_bytes_read(shape, min(new, chunk_tokens)),
        cache_bytes=cache,
        routed_elements=new * _routed_elements(shape),
        hidden_elements=float(new) * shape.layers * shape.hidden,
    )


def decode_work(
    shape: ModelShape, spec: KVSpec, batch: float, context: int, tensor: float = 1
) -> Work:
    """The work of one step that decodes one token of each of `batch` sequences of `context`
    tokens on `tensor` GPUs."""
    attention = sum(
        2.0 * kind.layers * (_decode_macs(kind, context) + kind.state_macs)
        for kind in shape.attention
    )
    output = shape.hidden * shape.vocabulary
    cache = kv_bytes(spec, _tokens_read(shape, context), tensor) + spec.state_bytes
    return Work(
        common_flops=2.0 * batch * (shape.common_elements + output),
        expert_flops=2.0 * batch * shape.routed_elements,
        attention_flops=batch * attention,
        weight_bytes=_weight_bytes_read(shape, batch) + output * BYTES_PER_WEIGHT["bf16"],
        cache_bytes=batch * cache,
        routed_elements=batch * _routed_elements(shape),
        hidden_elements=batch * shape.layers * shape.hidden,
    )


def growing_bytes(spec: KVSpec, tensor: float) -> float:
    """KV bytes that one token adds on all GPUs together. Tensor parallelism divides heads among
    the GPUs; with fewer heads than GPUs (a latent has one), some GPUs hold the same head."""
    return sum(
        len(group.layers) * group.bytes_per_token * max(1.0, tensor / group.heads)
        for group in spec.groups
        if isinstance(group, FullAttention)
    )


def kv_bytes(spec: KVSpec, tokens: int, tensor: float) -> float:
    """Bytes of one sequence on all GPUs together, with the same copies."""
    total = growing_bytes(spec, tensor) * tokens + spec.state_bytes
    for group in spec.groups:
        if isinstance(group, SlidingWindow):
            copies = max(1.0, tensor / group.heads)
            total += len(group.layers) * group.layer_bytes(tokens) * copies
    return total


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


def _tokens_read(shape: ModelShape, context: int) -> int:
    """Tokens whose KV a decode step reads. Sparse attention reads what it selected; the keys of
    its index, a tenth of the bytes, are not counted apart."""
    reaches = [kind.reach for kind in shape.attention if kind.kind == "latent"]
    if reaches and all(reach is not None for reach in reaches):
        return min(context, max(reach for reach in reaches if reach is not None))
    return context


def _routed_elements(shape: ModelShape) -> float:
    """Hidden elements of one token that are copied to its experts, in all layers."""
    experts = shape.experts
    if experts is None:
        return 0.0
    return float(experts.layers * experts.per_token * (experts.latent or shape.hidden))


def _weight_bytes_read(shape: ModelShape, tokens: float) -> float:
    """Weights that one pass of `tokens` tokens reads: of the experts only those that are used."""
    common = shape.common_elements * BYTES_PER_WEIGHT[shape.weights]
    if shape.experts is None:
        return common
    used = shape.experts.layers * shape.experts_read(tokens) * shape.expert_elements
    return common + used * BYTES_PER_WEIGHT[shape.expert_weights]
