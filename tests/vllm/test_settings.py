"""The connector's settings, and the caches that it refuses to convert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from prfaas.errors import InputError
from prfaas.integrations.vllm.caches.packing import cpu_packing, packing_of
from prfaas.integrations.vllm.settings import read_settings
from tests.vllm.models import full


def test_a_kvd_is_all_that_has_to_be_set() -> None:
    settings = read_settings({"kvd": "/run/kvd.sock"})
    assert (settings.kvd, settings.form, settings.block_tokens) == ("/run/kvd.sock", "auto", 64)
    assert settings.lookup_timeout_s == 0.5


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "no kvd is configured"),
        ({"kvd": ""}, "no kvd is configured"),
        ({"kvd": 5}, r"\$\.kvd"),
        ({"kvd": "x", "form": "cannonical"}, r"\$\.form"),
        ({"kvd": "x", "from": "canonical"}, "settings are: kvd, url, form"),
        ({"kvd": "x", "block_tokens": 0}, r"\$\.block_tokens"),
        ({"kvd": "x", "lookup_timeout_s": 0}, r"\$\.lookup_timeout_s"),
        ({"kvd": "x", "wire_kv_dtype": "fp16"}, "wire_kv_dtype"),
        ({"kvd": "x", "wire_kv_dtype": "float8_e4m3fn"}, "wire_kv_dtype"),  # scales do not travel
        ({"kvd": "x", "wire_state_dtype": "double"}, "wire_state_dtype"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named) as refused:
        read_settings(extra)
    assert "kv_connector_extra_config" in str(refused.value)


def layer(backend: str, **more: Any) -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend), **more)


def test_packings_that_are_known() -> None:
    assert packing_of("l", layer("FLASH_ATTN"), full()) == "content"
    assert packing_of("l", layer("B12X"), full(num_head_slots=2)) == "planes"
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    assert packing_of("l", layer("CPU_MLA"), latent) == "mla"


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("TURBOQUANT", {"state_content_bytes": 96}),
        ("FLASH_ATTN", {"state_content_bytes": 96}),  # scales beside the values
        ("FLASH_ATTN", {"num_head_slots": 2}),
        ("ROCM_ATTN", {}),
        ("SOMETHING_NEW", {}),
        ("FLASHMLA", {}),  # a latent backend without latents
    ],
)
def test_other_packings_are_refused_by_name(backend: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"layer l: .*{backend} cannot be converted") as refused:
        packing_of("l", layer(backend), full(**changes))
    assert '"form": "native"' in str(refused.value)


def test_latents_in_an_unknown_backend_are_refused() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    with pytest.raises(InputError, match="FLASHMLA_SPARSE cannot be converted"):
        packing_of("l", layer("FLASHMLA_SPARSE"), latent)


def test_the_packing_of_a_cpu_is_read_off_vllms_own_operator() -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.float32, 128, 64, "auto")
    assert cpu_packing(isa, torch.float32, "auto", 128, 64) == "cpu_vec"
