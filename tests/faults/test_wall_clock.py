"""The system lives by monotonic clocks: who sets a wall clock disturbs timestamps, nothing else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas_lab.faults.wall_clock import WallClock
from tests.test_architecture import FILES, LAB_FILES, LABORATORY, SOURCE

PRINTS = "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic())"
# What shows a date to people or to other programs, or is about dates.
SHOWN = {
    "cli/profile.py",  # when a profile was measured
    "gateway/api/app.py",  # `created` of a model
    "gateway/console/feed.py",  # the time of a scene
    "gateway/console/recent.py",  # the time of a request's arrival
    "gateway/following/export.py",  # the times of spans
    "gateway/following/paths.py",  # the times of spans
    "node/request_reader.py",  # `created` of an answer
    "text/template.py",  # strftime_now of chat templates
    "security/certificates.py",
    "tracing/epoch.py",  # the times of spans
    "tracing/recorder.py",  # the times of spans
}
IN_THE_LABORATORY = {"faults/wall/sitecustomize.py"}  # sets it
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}


def reads_wall_clock(path: Path) -> bool:
    """Also where the function is passed on, or imported by its name."""
    last_words = {wall.rpartition(".")[2] for wall in WALL}
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in last_words:
            names.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return any(name == wall or name.endswith(f".{wall}") for name in names for wall in WALL)


def test_only_what_shows_a_date_reads_the_wall_clock() -> None:
    found = {str(path.relative_to(SOURCE)) for path in FILES if reads_wall_clock(path)}
    assert found <= SHOWN
    found = {str(path.relative_to(LABORATORY)) for path in LAB_FILES if reads_wall_clock(path)}
    assert found <= IN_THE_LABORATORY


@pytest.mark.parametrize("shift_s", [0.0, 3600.0, -7200.0])
def test_processes_see_the_wall_clock_that_is_set(tmp_path: Path, shift_s: float) -> None:
    clock = WallClock(tmp_path / "wall")
    clock.set_shift(shift_s)

    def read(environment: dict[str, str]) -> list[float]:
        printed = subprocess.run(
            [sys.executable, "-c", PRINTS],
            env={**os.environ, **environment},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return [float(word) for word in printed.split()]

    true_s, true_ns_s, monotonic_s = read({})
    off_s, off_ns_s, other_s = read(clock.environment)
    assert abs(off_s - true_s - shift_s) < 300 and abs(off_ns_s - true_ns_s - shift_s) < 300
    assert 0 < other_s - monotonic_s < 300
