from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prfaas.engine.checkpoint.architectures import ARCHITECTURES
from tests.cli.runner import Result

Run = Callable[..., Result]


def test_make_says_what_it_made(prfaas: Run, tmp_path: Path) -> None:
    made = prfaas("model", "make", tmp_path / "a", "--json").json
    assert made["arch"] == "kimi-linear" and made["size"] == "tiny" and made["layers"] == 8
    assert made["directory"] == str(tmp_path / "a")
    shown = prfaas("model", "make", tmp_path / "b", "--arch", "qwen3", "--seed", 3)
    assert "8 layers" in shown.out and "qwen3" in shown.out and not shown.err


def test_mistakes_are_one_line(prfaas: Run, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    for arguments, expected in (
        ((tmp_path,), "the directory is not empty; name a new one, or use --force"),
        ((tmp_path / "c", "--seed", -1), "--seed: -1 is out of range"),
    ):
        result = prfaas("model", "make", *arguments)
        assert result.code == 2
        assert expected in result.err and result.err.count("\n") == 1
    unknown = prfaas("model", "make", tmp_path / "c", "--arch", "gpt")
    assert unknown.code == 2
    assert all(arch in unknown.err for arch in ARCHITECTURES)
