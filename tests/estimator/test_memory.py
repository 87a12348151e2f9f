"""What fits into the memory of an instance."""

from __future__ import annotations

import pytest

from prfaas.errors import InputError
from prfaas.estimator.memory import USABLE_SHARE, kv_bytes_available, most_sequences, require_fit
from prfaas.estimator.profile import estimated_profile
from tests.estimator.instances import accelerator, instance


def test_weights_leave_the_rest_for_kv() -> None:
    place = instance("qwen3-4b", accelerator(memory_gb=10.0), 1)
    free = 10e9 * USABLE_SHARE - place.shape.weight_bytes
    assert kv_bytes_available(place) == free
    assert most_sequences(place, 1000) == int(free // place.spec.kv_bytes(1000))


def test_a_latent_is_held_by_every_gpu() -> None:
    eight = instance("deepseek-v3", accelerator(memory_gb=200.0), 8)
    free = kv_bytes_available(eight)
    assert most_sequences(eight, 10_000) == int(free // (8 * eight.spec.kv_bytes(10_000)))


def test_a_model_that_does_not_fit_is_refused_with_the_gpus_it_needs() -> None:
    with pytest.raises(InputError, match="do not fit") as refused:
        require_fit(instance("deepseek-v3", "h100", 4), 8192)
    assert "at least 9 GPUs" in str(refused.value)


def test_an_estimated_profile_has_batches_up_to_what_fits() -> None:
    place = instance("case-study-1t", "h20", 8)
    record = estimated_profile(place, 28_000)
    assert record.status == "estimated"
    assert record.decode[-1].batch == most_sequences(place, 28_000)
    steps = [point.step_s for point in record.decode]
    assert steps == sorted(steps)
    assert {point.cached for point in record.prefill} > {0}
