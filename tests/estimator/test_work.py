"""Counted work, against sums written out by hand."""

from __future__ import annotations

import pytest

from prfaas.estimator.work import decode_work, growing_bytes, kv_bytes, prefill_work
from tests.estimator.instances import CATALOG


def pairs(new: int, cached: int, reach: int | None) -> int:
    """Pairs of a token and one that it attends to, itself included."""
    before = (position + 1 for position in range(cached, cached + new))
    return sum(count if reach is None else min(count, reach) for count in before)


@pytest.mark.parametrize("cached", [0, 50, 1000])
@pytest.mark.parametrize("model", ["qwen3-4b", "mimo-v2-flash", "deepseek-v3.2"])
def test_attention_counts_every_pair_within_reach(model: str, cached: int) -> None:
    entry = CATALOG.model(model)
    shape = entry.model_shape()
    expected = sum(
        2
        * kind.layers
        * (
            kind.prefill_macs * pairs(300, cached, kind.reach)
            + kind.index_macs * pairs(300, cached, None)
            + kind.state_macs * 300
        )
        for kind in shape.attention
    )
    work = prefill_work(shape, entry.spec(), 300, cached, 8192)
    # Within one token of reach: the last token's own position.
    assert work.attention_flops == pytest.approx(expected, rel=0.01)


def test_every_chunk_reads_the_weights_and_the_kv_before_it() -> None:
    entry = CATALOG.model("qwen3-4b")
    shape, spec = entry.model_shape(), entry.spec()
    one = prefill_work(shape, spec, 8192, 0, 8192)
    two = prefill_work(shape, spec, 8192, 0, 4096)
    assert two.weight_bytes == 2 * one.weight_bytes
    assert two.cache_bytes - one.cache_bytes == 4096 * spec.bytes_per_token
    assert two.common_flops == one.common_flops


def test_packed_prompts_share_the_weights_of_a_chunk() -> None:
    entry = CATALOG.model("qwen3-4b")
    shape, spec = entry.model_shape(), entry.spec()
    alone = prefill_work(shape, spec, 1024, 0, 8192)
    packed = prefill_work(shape, spec, 1024, 0, 8192, packed=True)
    assert packed.weight_bytes == alone.weight_bytes / 8
    assert packed.common_flops == alone.common_flops


def test_gpus_hold_copies_of_heads_that_they_cannot_divide() -> None:
    latent, heads = CATALOG.model("deepseek-v3").spec(), CATALOG.model("qwen3-4b").spec()
    assert growing_bytes(latent, 8) == 8 * latent.bytes_per_token  # a latent has no heads
    assert growing_bytes(heads, 8) == heads.bytes_per_token  # eight heads for eight GPUs
    assert growing_bytes(heads, 16) == 2 * heads.bytes_per_token


@pytest.mark.parametrize("model", sorted(CATALOG.models))
def test_one_gpu_holds_the_bytes_of_the_canonical_form(model: str) -> None:
    spec = CATALOG.model(model).spec()
    assert kv_bytes(spec, 10_000, 1) == spec.kv_bytes(10_000)


def test_a_decode_step_reads_only_the_experts_in_use() -> None:
    entry = CATALOG.model("qwen3-235b-a22b")
    shape, spec = entry.model_shape(), entry.spec()
    assert shape.experts is not None
    one, many = (decode_work(shape, spec, batch, 1000).weight_bytes for batch in (1, 10_000))
    expert = shape.experts.layers * shape.expert_elements * 2.0
    unused = shape.experts.count - shape.experts.per_token
    assert many - one == pytest.approx(unused * expert, rel=1e-6)


def test_sparse_attention_reads_only_the_tokens_it_selects() -> None:
    entry = CATALOG.model("deepseek-v3.2")
    work = [
        decode_work(entry.model_shape(), entry.spec(), 1, context).cache_bytes
        for context in (2048, 100_000)
    ]
    assert work[0] == work[1]
