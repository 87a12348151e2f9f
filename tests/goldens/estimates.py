"""What is known or estimated of models and accelerators: `prfaas kv` and `prfaas profile`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.goldens.canonical import Golden
from tests.goldens.checkpoints import make_checkpoint
from tests.goldens.commands import prfaas, workplace

MODELS = ("kimi-linear-48b-a3b", "qwen3.5-397b-a17b", "gpt-oss-120b", "case-study-1t")


def goldens() -> Iterator[Golden]:
    with workplace():
        make_checkpoint(Path())
        yield Golden("kv.json", prfaas("kv", "--json").data)
        yield Golden("kv.txt", prfaas("kv").text)
        for model in MODELS:
            words = ("kv", model, "--lengths", "4096,65536", "--accelerator", "h20", "--json")
            yield Golden(f"kv.{model}.json", prfaas(*words).data)
        small = ("--config", "config.json", "--gpus-per-instance", 1, "--json")
        yield Golden("kv.config.json", prfaas("kv", *small).data)
        for model, accelerator in (("qwen3.5-397b-a17b", "h200"), ("kimi-linear-48b-a3b", "h20")):
            estimate = ("profile", "--estimate", model, "--accelerator", accelerator, "--gpus", 8)
            yield Golden(f"profile.{model}.json", prfaas(*estimate, "--json").data)
            yield Golden(f"profile.{model}.txt", prfaas(*estimate, "--out", "found.toml").text)
            yield Golden(f"profile.{model}.toml.txt", Path("found.toml").read_text("utf-8"))
            Path("found.toml").unlink()
