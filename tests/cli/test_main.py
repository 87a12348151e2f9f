"""The installed command in a process of its own."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from prfaas import __version__
from prfaas.display.console import with_progress
from prfaas_lab.testing import FakeClock
from tests.cli.runner import Result
from tests.waiting import PATIENCE_S

Run = Callable[..., Result]
COMMAND = Path(sys.executable).with_name("prfaas")
CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"


def test_a_real_process_ends_with_2_and_one_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [COMMAND, "plan", "none.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == "error: none.toml: no such file; check the path\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    ended = subprocess.run(
        f"{COMMAND} plan {CASE_STUDY} --json | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.stdout == "{\n"
    assert ended.stderr == ""


def test_output_that_cannot_be_written_is_said() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [COMMAND, "kv", "ring-2.5-1t"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert ended.returncode == 1
    assert ended.stderr == "error: cannot write the output: No space left on device\n"


def test_help_teaches(prfaas: Run) -> None:
    assert "is it worth it" in prfaas("--help").out
    assert "--sweep links.0.gbps=5,8,10,100" in prfaas("plan", "--help").out
    assert __version__ in prfaas("--version").out


def test_the_laboratory_is_no_part_of_the_product(prfaas: Run) -> None:
    for name in ("bench", "soak"):
        result = prfaas(name)
        assert result.code == 2 and f"No such command '{name}'" in result.err


def test_a_progress_bar_appears_only_when_work_takes_long() -> None:
    clock = FakeClock()
    for step_s, shown in ((0.1, False), (2.0, True)):
        screen = Console(file=io.StringIO(), force_terminal=True, width=80)
        seen = []
        for item in with_progress([1, 2, 3], "counting", clock=clock, screen=screen):
            seen.append(item)
            clock.advance(step_s)
        assert seen == [1, 2, 3]
        assert isinstance(screen.file, io.StringIO)
        assert ("counting" in screen.file.getvalue()) is shown
