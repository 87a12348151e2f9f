"""Traffic that shifts, served and simulated: the same moves, to where the planner would be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "shift.py"


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_the_gateway_follows_to_the_optimum_as_the_simulator_does() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == 0, found["why"]
    assert found["same_order"], (found["live"], found["simulated"])
    for phase in found["phases"]:
        assert phase["of_the_optimums_capacity"] >= 0.9, phase
        assert phase["of_the_optimums_threshold"] == pytest.approx(1.0, abs=0.1), phase
        assert phase["planned"]["prefill"] == phase["optimum"]["prefill"]
        assert phase["simulated"]["prefill"] == phase["optimum"]["prefill"]
    (conversion,) = found["conversions"]
    assert conversion["role"] == "prefill", "one node, once: no oscillation"
    assert len(found["live"]) <= 10
