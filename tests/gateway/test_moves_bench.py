"""`bench moves` runs and prints what it promises. How much was gained is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "moves.py"


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_both_ways_are_measured_on_the_same_requests() -> None:
    options = ["--rounds", "1", "--topics", "1", "--requests", "6", "--shared", "8192"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--time-scale", "0.1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [run["replicate"] for run in found["runs"]] == [False, True]
    assert found["runs"][0]["moves"]["replicate"]["made"] == 0
    assert found["requests"] == 6
    for name in ("without", "with"):
        assert 0 < found["ttft_s"][name]["p50"] <= found["ttft_s"][name]["max"]
