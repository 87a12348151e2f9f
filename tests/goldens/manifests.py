"""What `prfaas render kubernetes` writes, for several engines and clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.goldens.canonical import Golden
from tests.goldens.checkpoints import make_checkpoint
from tests.goldens.commands import prfaas, workplace
from tests.goldens.folders import described

ADDRESS = ("--gateway-address", "pd=gw.example.net:8080")
CASE = ("configs/case_study.toml", *ADDRESS)
REAL = ("real.toml", *ADDRESS)
RUNS: dict[str, tuple[object, ...]] = {
    "emulated": (
        *CASE,
        *("--engine", "emulated", "--instances", "pd=3", "--time-scale", 0.5),
        *("--byte-scale", 0.002, "--output-scale", 0.02),
    ),
    "vllm": (
        *REAL,
        *("--engine", "vllm", "--model-claim", "models", "--registry", "registry.example.net/"),
        *("--ssd-size", "1TB", "--memory", "64GiB", "--tenant", "a", "--tenant", "b"),
        *("--node-selector", "pd=gpu=h20", "--peer-network", "10.0.0.0/8"),
        *("--gateway-name", "pd=api.example.net"),
    ),
    "hf": (
        *REAL,
        *("--engine", "hf", "--model-claim", "models", "--model-path", "/data/m"),
        *("--network", "host", "--no-monitoring"),
    ),
    "two_homes": (
        "configs/two_by_two.toml",
        *("--engine", "emulated", "--instances", "east=2", "--instances", "west=2"),
        *("--instances", "north=1", "--instances", "south=1"),
        *("--gateway-address", "east=gw.east.example:8080"),
        *("--gateway-address", "west=gw.west.example:8080"),
    ),
}


def goldens() -> Iterator[Golden]:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    with workplace():
        make_checkpoint(Path("checkpoint"))
        Path("real.toml").write_text(_with_checkpoint(Path("configs/qwen3.5_h200_h20.toml")))
        for name, words in RUNS.items():
            command = ("render", "kubernetes", *words, "--out", name)
            yield Golden(f"{name}.txt", prfaas(*command).text)
            yield Golden(f"{name}.files.json", described(Path(name)))
        rotated = ("render", "kubernetes", *RUNS["emulated"], "--out", "emulated")
        prfaas(*rotated, "--rotate-keys", "add")
        yield Golden("rotated.files.json", described(Path("emulated") / "keys"))


def _with_checkpoint(file: Path) -> str:
    """The deployment with the checkpoint's model, whose times are estimated."""
    lines = file.read_text(encoding="utf-8").splitlines()
    at = lines.index("[model]")
    lines[at + 1 : at + 1] = ['config = "checkpoint/config.json"']
    return "\n".join([*lines, ""])
