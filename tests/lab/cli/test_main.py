"""The laboratory's commands, in this process and in one of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.interpreter import module_command
from prfaas_lab.cli.main import COMMANDS
from tests.cli.runner import Result
from tests.waiting import PATIENCE_S

Run = Callable[..., Result]
COMMAND = module_command("prfaas_lab")
DOCS = Path(__file__).parents[3] / "docs"


def test_help_teaches(lab: Run) -> None:
    assert "which benchmarks are there?" in lab("--help").out
    for name in COMMANDS:
        assert f"python -m prfaas_lab {name}" in lab(name, "--help").out


def test_pages_of_the_schema_are_printed(lab: Run) -> None:
    for name in ("configuration", "api"):
        assert lab("reference", name).out == (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_bench_lists_and_refuses(lab: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "the folder has no benchmarks" in lab("bench").err
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "hello.py").touch()
    assert "benchmarks: hello" in lab("bench").out
    assert "choose one of: hello" in lab("bench", "other").err


def test_a_benchmark_is_the_process_that_was_started(tmp_path: Path) -> None:
    """So that a signal to the command ends the benchmark."""
    (tmp_path / "bench").mkdir()
    script = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    (tmp_path / "bench" / "hello.py").write_text(script)
    command = [*COMMAND, "bench", "hello", "--option", "two words"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as started:
        printed, _ = started.communicate(timeout=PATIENCE_S)
    assert printed == f"{started.pid} --option two words\n"
    assert started.returncode == 7
