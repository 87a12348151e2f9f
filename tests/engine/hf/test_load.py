"""Loading errors are one line that names the directory and the fix."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, Qwen3Config, Qwen3ForCausalLM

from prfaas.engine.api import EngineJob, Sampling
from prfaas.engine.hf import load, load_model
from prfaas.engine.hf.shapes import layer_shapes
from prfaas.errors import InputError
from prfaas.kvspec import build_spec
from prfaas_lab.testing.engine_runs import run
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "gemma3"))
def test_weights_that_go_straight_to_a_device_are_the_same(arch: str, dtype: str) -> None:
    """Kimi Linear has experts to merge, Gemma has output weights that are its embeddings."""
    path, on = models.checkpoint(arch), torch.device("cpu")
    through_host = load._from_pretrained(path, on, load.DTYPES[dtype])
    straight = load._onto_device(path, on, load.DTYPES[dtype])
    expected, found = through_host.state_dict(), straight.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
    buffers = dict(straight.named_buffers())
    assert all(torch.equal(one, buffers[name]) for name, one in through_host.named_buffers())
    tied = through_host.get_input_embeddings().weight is through_host.get_output_embeddings().weight
    assert tied == (arch == "gemma3")
    assert tied == (
        straight.get_input_embeddings().weight is straight.get_output_embeddings().weight
    )
    assert not straight.training


def test_a_device_map_needs_no_other_package() -> None:
    """And the check for that package is as it was afterwards."""
    required = load.device_maps.is_accelerate_available
    load._onto_device(models.checkpoint("qwen3"), torch.device("cpu"), torch.float32)
    assert load.device_maps.is_accelerate_available is required


def test_a_damaged_checkpoint_that_goes_straight_to_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models.checkpoint("kimi-linear"), broken)
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    monkeypatch.setattr(load, "_from_pretrained", load._onto_device)
    for damaged in (whole[:1000], whole[:-1000], b"\xff" * 1000):
        weights.write_bytes(damaged)
        assert "cannot load the checkpoint" in refused(broken, device="cpu")
    weights.unlink()
    assert "cannot load the checkpoint" in refused(broken, device="cpu")


def test_a_device_without_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(load, "_from_pretrained", full)
    message = refused(models.checkpoint("qwen3"), device="cpu")
    assert "device: cpu has too little memory for the weights in float32" in message


def test_a_library_that_needs_more_loads_through_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def needs_more(*_: object) -> None:
        raise ImportError("no accelerate")

    monkeypatch.setattr(load, "_onto_device", needs_more)
    elsewhere = torch.device("meta")
    model = load._from_pretrained(models.checkpoint("qwen3"), elsewhere, torch.float32)
    assert model.device == elsewhere
    assert "the weights go through the host's memory" in caplog.text


def test_the_shapes_are_those_of_a_tuned_model() -> None:
    """A GPU runs a longer prompt first, which tunes its kernels. What is cached is the same."""
    loaded = models.loaded("kimi-linear")
    wire = load.DTYPES[loaded.state_dtype]
    found = layer_shapes(loaded.model, loaded.spec, wire, first_tokens=70, where="here")
    assert found == loaded.shapes


def test_every_phase_of_the_load_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load_model(models.checkpoint("qwen3"), device="cpu")
    phases = [record.getMessage() for record in caplog.records if "start: " in record.getMessage()]
    assert [re.sub(r" in [0-9.]+ s$", "", phase) for phase in phases] == [
        "start: read the config",
        "start: imported the model's code",
        "start: loaded the weights onto cpu",
        "start: ran the model once",
        "start: read the weights' fingerprint",
    ]
