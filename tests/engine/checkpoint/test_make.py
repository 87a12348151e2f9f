"""Every architecture: loads with transformers, is read by the catalog, and its output depends on
its state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prfaas.catalog.hf_config import geometry_of
from prfaas.engine.checkpoint.architectures import ARCHITECTURES, MAX_TOKENS, SIZES
from prfaas.engine.checkpoint.make import MadeCheckpoint, make_checkpoint
from prfaas.engine.checkpoint.tokenizer import VOCAB_SIZE
from prfaas.errors import InputError
from prfaas.kvspec import MLA, Linear, WindowedGQA

NEW_TOKENS = 16
PROMPT_TOKENS = 160  # beyond every window


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeCheckpoint]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: make_checkpoint(folder / arch, arch) for arch in ARCHITECTURES}


@pytest.mark.parametrize(
    "arch",
    [
        # The default model, with which most other tests generate, takes longest.
        pytest.param(arch, marks=pytest.mark.slow if arch == "kimi-linear" else ())
        for arch in ARCHITECTURES
    ],
)
def test_greedy_tokens_depend_on_the_whole_prompt(
    made: dict[str, MadeCheckpoint], arch: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(made[arch].directory).eval()
    assert model.dtype == torch.float32
    assert model.config.vocab_size == VOCAB_SIZE
    generator = torch.Generator().manual_seed(1)
    first, other = torch.randint(0, 256, (2, PROMPT_TOKENS), generator=generator)
    early = first.clone()
    early[3] = (early[3] + 100) % 256
    prompts = torch.stack([first, other, early])
    with torch.inference_mode():
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[:, PROMPT_TOKENS:].tolist()
    assert all(len(set(answer)) > NEW_TOKENS // 2 for answer in tokens), "repeats itself"
    matches = sum(a == b for a, b in zip(tokens[0], tokens[1], strict=True))
    assert matches < NEW_TOKENS // 4, "the output does not depend on the prompt"
    assert tokens[2] != tokens[0], "has forgotten the beginning"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_catalog_reads_its_geometry(made: dict[str, MadeCheckpoint], arch: str) -> None:
    config = json.loads((made[arch].directory / "config.json").read_text())
    found = geometry_of(config)
    layers = {layer for geometry in found.geometries for layer in geometry.layers}
    assert layers == set(range(made[arch].layers))
    assert found.kv_dtype == found.state_dtype == "float32"
    assert made[arch].max_tokens >= MAX_TOKENS
    for geometry in found.geometries:
        assert not isinstance(geometry, WindowedGQA) or geometry.window <= PROMPT_TOKENS


def test_the_default_model_has_three_kda_layers_to_one_of_latent_attention(
    made: dict[str, MadeCheckpoint],
) -> None:
    config = json.loads((made["kimi-linear"].directory / "config.json").read_text())
    kinds = {type(geometry): geometry.layers for geometry in geometry_of(config).geometries}
    assert len(kinds[Linear]) == 3 * len(kinds[MLA])
    assert made["kimi-linear"].layers >= 8
    assert min(kinds[MLA]) < made["kimi-linear"].layers // 2


def test_deepseeks_config_says_how_experts_are_chosen(made: dict[str, MadeCheckpoint]) -> None:
    """vLLM loads no weights of a gate whose config does not; transformers chooses so anyway."""
    config = json.loads((made["deepseek-v3"].directory / "config.json").read_text())
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    (latent,) = geometry_of(config).geometries
    assert isinstance(latent, MLA) and (latent.kv_lora_rank, latent.rope_dim) == (512, 64)


def test_text_comes_back_and_a_conversation_has_its_markers(
    made: dict[str, MadeCheckpoint],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made["kimi-linear"].directory)
    assert len(tokenizer) == VOCAB_SIZE
    for text in ("Hello, world!", " ünïcode 日本語 🙂\n\ttabs  and spaces ", "\x00\x7f", "don't"):
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered: Any = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(rendered)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert tokenizer.eos_token_id in range(256, VOCAB_SIZE)


def test_the_same_seed_gives_the_same_bytes(
    made: dict[str, MadeCheckpoint], tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    again = make_checkpoint(tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator changed"
    names = sorted(path.name for path in again.directory.iterdir())
    assert names == sorted(path.name for path in made["kimi-linear"].directory.iterdir())
    for name in names:
        assert (again.directory / name).read_bytes() == (
            made["kimi-linear"].directory / name
        ).read_bytes(), name
    other = make_checkpoint(tmp_path / "other", seed=1)
    assert (other.directory / "model.safetensors").read_bytes() != (
        again.directory / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_small_one_is_larger(made: dict[str, MadeCheckpoint], tmp_path: Path, arch: str) -> None:
    small = make_checkpoint(tmp_path / arch, arch, "small")
    assert small.layers == 12
    assert small.parameters > 4 * made[arch].parameters
    config = json.loads((small.directory / "config.json").read_text())
    assert config["hidden_size"] == 256
    assert {layer for g in geometry_of(config).geometries for layer in g.layers} == set(range(12))


def test_what_is_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        make_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    (tmp_path / "model-00001-of-00002.safetensors").write_text("another model's")
    make_checkpoint(tmp_path, force=True)
    assert (tmp_path / "kept.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert (tmp_path / "config.json").exists()


def test_names_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="known: kimi-linear"):
        make_checkpoint(tmp_path / "a", "kimi")
    with pytest.raises(InputError, match=f"known: {', '.join(SIZES)}"):
        make_checkpoint(tmp_path / "a", size="huge")  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        make_checkpoint(tmp_path / "file")
