"""Loading errors are one line that names the directory and the fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, Qwen3Config, Qwen3ForCausalLM

from prfaas.engine.api import EngineJob, Sampling
from prfaas.engine.hf import load_model
from prfaas.engine.runner import run
from prfaas.errors import InputError
from prfaas.kvspec import build_spec
from tests.catalog.hf_tiny import TINY
from tests.engine.hf import models


def refused(source: Path, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        load_model(source, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_such_directory(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "nowhere")


def test_not_a_checkpoint(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    assert "no-such-model" in refused(tmp_path)


def test_not_a_causal_language_model(tmp_path: Path) -> None:
    BertConfig(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    assert "'vit' is not a causal language model" in refused(tmp_path)


def test_weights_missing_or_cut_short(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models.checkpoint("qwen3"), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot load the checkpoint" in refused(broken)
    weights.unlink()
    assert "cannot load the checkpoint" in refused(broken)


def test_a_cache_layer_of_another_kind(tmp_path: Path) -> None:
    """DeepSeek-V3.2's indexer keeps separate keys beside the latents."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY["deepseek_v32"]))
    message = refused(path, random_weights=True)
    assert "DynamicIndexedLayer, which cannot be exported" in message


def test_wrong_device_and_dtype() -> None:
    directory = models.checkpoint("qwen3")
    assert "use cpu, cuda or cuda:N" in refused(directory, device="tpu")
    assert "this host has" in refused(directory, device=f"cuda:{torch.cuda.device_count()}")
    assert "use one of: float32" in refused(directory, dtype="int3")


def test_a_prompt_longer_than_the_model() -> None:
    engine = models.engine("qwen3")
    longest = engine.limits.max_tokens
    with pytest.raises(InputError, match=f"more than the model's {longest}"):
        run(engine, EngineJob("long", [1] * longest, Sampling(max_tokens=1)))


def test_revisions_tell_weights_apart(tmp_path: Path) -> None:
    one = models.loaded("qwen3")
    assert load_model(models.checkpoint("qwen3")).revision == one.revision
    config = Qwen3Config.from_pretrained(models.checkpoint("qwen3"))
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    assert load_model(tmp_path).revision != one.revision


def test_a_config_alone_builds_a_random_model(tmp_path: Path) -> None:
    path = tmp_path / "anything.json"
    path.write_text((models.checkpoint("mimo") / "config.json").read_text())
    loaded = load_model(path, random_weights=True)
    assert loaded.spec == models.loaded("mimo").spec
    assert loaded.revision == "random"


@pytest.mark.parametrize("arch", models.ALL)
def test_the_spec_is_the_configs_own(arch: str) -> None:
    """The model's code caches the bytes that `prfaas kv` prints for the same config."""
    from prfaas.catalog.hf_file import read_hf_config

    config = read_hf_config(models.checkpoint(arch))
    expected = build_spec(config.geometries, kv_dtype="float32", state_dtype=config.state_dtype)
    assert models.loaded(arch).spec == expected
