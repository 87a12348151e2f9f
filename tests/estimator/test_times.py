"""Estimated times behave sensibly where there are no points to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.catalog.shape import WeightFormat
from prfaas.estimator.efficiency import fitted
from prfaas.estimator.instance import with_weights
from prfaas.estimator.times import decode_s, pipelined_s, prefill_parts, prefill_s
from tests.estimator.instances import CATALOG, accelerator, instance

CONSTANTS = fitted()
models = st.sampled_from(sorted(CATALOG.models))
accelerators = st.sampled_from(sorted(CATALOG.accelerators))
gpus = st.sampled_from([1, 2, 4, 8, 16, 32])
tokens = st.integers(1, 1_000_000)
ROUNDING = 1 + 1e-9
few = settings(max_examples=30)


@few
@given(models, accelerators, gpus, tokens, st.integers(0, 300_000), st.integers(0, 300_000))
def test_a_longer_prompt_or_prefix_is_never_faster(
    model: str, name: str, count: int, new: int, more: int, cached: int
) -> None:
    place = instance(model, name, count)
    time_s = prefill_s(place, CONSTANTS, new, cached)
    assert time_s > 0
    assert prefill_s(place, CONSTANTS, new + more, cached) * ROUNDING >= time_s
    assert prefill_s(place, CONSTANTS, new, cached + more) * ROUNDING >= time_s


@few
@given(models, accelerators, gpus, st.integers(1, 512), st.integers(0, 512), tokens)
def test_a_larger_batch_or_context_is_never_faster(
    model: str, name: str, count: int, batch: int, more: int, context: int
) -> None:
    place = instance(model, name, count)
    step_s = decode_s(place, CONSTANTS, batch, context)
    assert step_s > 0
    assert decode_s(place, CONSTANTS, batch + more, context) * ROUNDING >= step_s
    assert decode_s(place, CONSTANTS, batch, context + more) * ROUNDING >= step_s


@few
@given(models, accelerators, gpus, tokens, st.integers(1, 512))
def test_twice_the_gpus_are_never_slower(
    model: str, name: str, count: int, length: int, batch: int
) -> None:
    one, two = (instance(model, name, size) for size in (count, 2 * count))
    assert prefill_s(two, CONSTANTS, length) <= prefill_s(one, CONSTANTS, length) * ROUNDING
    step_s = decode_s(one, CONSTANTS, batch, 8192)
    assert decode_s(two, CONSTANTS, batch, 8192) <= step_s * ROUNDING


@pytest.mark.parametrize("figure", ["bf16_tflops", "memory_tbps", "interconnect_gbs"])
@few
@given(models, gpus, tokens, st.floats(0.1, 10), st.integers(1, 512))
def test_a_faster_accelerator_is_never_slower(
    figure: str, model: str, count: int, length: int, factor: float, batch: int
) -> None:
    common = {"bf16_tflops": 500.0, "memory_tbps": 3.0, "interconnect_gbs": 900.0}
    value = common[figure]
    low, high = sorted((value, value * factor))
    slow, fast = (
        instance(model, accelerator(**{**common, figure: size}), count) for size in (low, high)
    )
    assert prefill_s(fast, CONSTANTS, length) <= prefill_s(slow, CONSTANTS, length) * ROUNDING
    step_s = decode_s(slow, CONSTANTS, batch, 8192)
    assert decode_s(fast, CONSTANTS, batch, 8192) <= step_s * ROUNDING


def test_engine_classes_differ_by_their_fixed_time() -> None:
    fixed = CONSTANTS.prefill_fixed_s
    paper, vllm = (
        prefill_s(replace(instance(), engine_class=name), CONSTANTS, 8192)
        for name in ("paper", "vllm")
    )
    assert paper - vllm == pytest.approx(fixed.paper - fixed.vllm)


@pytest.mark.parametrize(
    ("weights", "name", "peak"),
    [
        ("bf16", "b200", "bf16_tflops"),
        ("fp8", "b200", "fp8_tflops"),
        ("fp4", "b200", "fp4_tflops"),
        ("int4", "b200", "bf16_tflops"),  # converted before it is multiplied
        ("fp4", "h200", "bf16_tflops"),
        ("fp8", "ascend-910c", "bf16_tflops"),
    ],
)
def test_the_peak_follows_from_the_format_of_the_weights(
    weights: WeightFormat, name: str, peak: str
) -> None:
    place = instance("qwen3-4b", name, 1)
    place = replace(place, shape=with_weights(place.shape, weights))
    flops = 2.0 * 8192 * place.shape.common_elements
    expected = flops / (getattr(place.accelerator, peak).value * 1e12)
    assert prefill_parts(place, 8192, 0, 1).matrix == pytest.approx(expected)


def test_only_gpus_that_share_layers_exchange_activations() -> None:
    place = instance("qwen3-4b", accelerator(), 8)
    assert prefill_parts(place, 4096, 0, 1).exchange == 0
    shape = place.shape
    # Two exchanges of two bytes per layer; each of eight GPUs sends 7/8 of the activation twice.
    sent = 4096 * shape.layers * shape.hidden * 2 * 2 * 2 * 7 / 8
    assert prefill_parts(place, 4096, 0, 8).exchange == pytest.approx(sent / 450e9)


def test_a_pipeline_overlaps_all_chunks_but_the_first() -> None:
    # Ten chunks of 1 s through four stages of a quarter each: thirteen quarter steps.
    assert pipelined_s(10.0, 1.0, 4) == pytest.approx(13 / 4)
    assert pipelined_s(1.0, 1.0, 4) == 1.0  # one chunk has nothing to overlap with


def test_domains_form_a_pipeline() -> None:
    one, two = (instance("deepseek-v3", "h20", size) for size in (8, 16))
    fixed = CONSTANTS.prefill_fixed_s.paper
    whole, first, both = (
        prefill_s(place, CONSTANTS, length) - fixed
        for place, length in ((one, 131072), (one, 8192), (two, 131072))
    )
    assert both == pytest.approx(pipelined_s(whole, first, 2))
    # One short prompt has a single chunk, so a second domain does not help.
    assert prefill_s(two, CONSTANTS, 1024) == pytest.approx(prefill_s(one, CONSTANTS, 1024))


def test_a_slow_interconnect_leaves_gpus_idle_rather_than_slow_them_down() -> None:
    slow = instance("qwen3-235b-a22b", accelerator(interconnect_gbs=1.0), 8)
    fixed = CONSTANTS.prefill_fixed_s.paper
    one = prefill_parts(slow, 131072, 0, 1).seconds(CONSTANTS)
    assert prefill_s(slow, CONSTANTS, 131072) == pytest.approx(fixed + one)
