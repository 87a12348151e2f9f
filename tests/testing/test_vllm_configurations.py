from __future__ import annotations

import json

import pytest

from prfaas.errors import InputError
from prfaas_lab.testing.vllm_configurations import (
    SERVED_MODELS,
    VLLM_CONFIGURATIONS,
    configuration_named,
    transfer_config,
)


def value(flags: list[str], name: str) -> str | None:
    return flags[flags.index(name) + 1] if name in flags else None


def test_ranks_stages_and_blocks_become_flags() -> None:
    model = SERVED_MODELS["gemma3"]
    flags = configuration_named("tp2b64").flags(model)
    assert value(flags, "--tensor-parallel-size") == "2" and value(flags, "--block-size") == "64"
    assert "--pipeline-parallel-size" not in flags and "--no-enforce-eager" not in flags
    staged = configuration_named("pp2").flags(model)
    assert value(staged, "--pipeline-parallel-size") == "2" and "--no-enforce-eager" in staged
    assert json.loads(value(staged, "--compilation-config") or "")["backend"] == "eager"


def test_a_models_own_settings_and_a_pipelines_are_merged() -> None:
    """vLLM takes the last --compilation-config only."""
    flags = configuration_named("pp2").flags(SERVED_MODELS["deepseek-v3"])
    assert flags.count("--compilation-config") == 1
    found = json.loads(value(flags, "--compilation-config") or "")
    assert found == {"custom_ops": ["none"], "mode": 2, "backend": "eager"}
    assert "--max-num-batched-tokens" not in flags  # the whole prompt is one step


def test_each_worker_has_a_core() -> None:
    def bound(name: str, first: int = 0) -> str:
        found = configuration_named(name).environment([4, 5], first)
        return found["VLLM_CPU_OMP_THREADS_BIND"]

    assert (bound("tp1"), bound("tp1", 1)) == ("4", "5")
    assert (bound("tp2"), bound("tp4"), bound("pp2")) == ("4|5", "4|5|4|5", "4|5")
    assert configuration_named("tp2").environment([7], 0) == {"VLLM_CPU_OMP_THREADS_BIND": "7|7"}


@pytest.mark.parametrize("arch", SERVED_MODELS)
def test_what_vllm_does_not_run_is_refused_with_the_reason(arch: str) -> None:
    model = SERVED_MODELS[arch]
    found = {name: one.refusal(model) for name, one in VLLM_CONFIGURATIONS.items()}
    assert found["tp1"] is found["tp2"] is found["tp4"] is found["pp2"] is None
    assert (found["ds"] is None) == (arch == "falcon-h1")
    assert (found["b64"] is None) == (found["cached"] is None) == (arch != "deepseek-v3")


def test_states_are_cached_at_block_boundaries_only() -> None:
    flags = configuration_named("cached").flags(SERVED_MODELS["falcon-h1"])
    assert value(flags, "--mamba-cache-mode") == "align"
    assert value(flags, "--max-num-batched-tokens") == "128"
    assert "--mamba-cache-mode" not in configuration_named("cached").flags(SERVED_MODELS["qwen3"])


def test_settings_of_the_connector() -> None:
    found = transfer_config("/run/kvd.sock", form="canonical")
    assert found["kv_connector_extra_config"] == {"kvd": "/run/kvd.sock", "form": "canonical"}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown configuration 'tp3'; use one of: node, tp1"):
        configuration_named("tp3")
