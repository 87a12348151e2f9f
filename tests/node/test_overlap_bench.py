"""`bench overlap` runs and prints what it promises. How fast anything was is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.hosts import START_S

BENCH = Path(__file__).parents[2] / "bench" / "overlap.py"
pytestmark = [pytest.mark.grid, pytest.mark.timeout(2 * START_S)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_both_ways_are_measured_in_every_round() -> None:
    done = run("--tokens", "512", "--chunk-tokens", "64", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tokens"], report["chunks"]) == (512, 8)
    assert report["vllm"] == "not run: no --vllm-python was given"
    assert report["hf"]["transfer_bytes"] > 0 and len(report["hf"]["rounds"]) == 2
    for one in report["hf"]["rounds"]:
        (_, ended_s), (_, committed_s) = one["prefill_s"], one["commit_s"]
        assert committed_s > ended_s  # pushed after the prefill, it cannot come before


def test_too_few_chunks_are_refused() -> None:
    done = run("--tokens", "512", "--chunk-tokens", "128")
    assert done.returncode != 0 and "--tokens" in done.stderr
