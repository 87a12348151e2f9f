"""Wall time of `prfaas plan` as a process, start-up included.

    python -m prfaas_lab bench planner [--repeats N]

Goals: a sweep of 50 link speeds of the case study, and a plan for 10,000 GPUs, each under 5 s.
There is no other planner to compare with: no public one solves for threshold and split.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
GOAL_S = 5.0


def wall_s(*arguments: object) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "prfaas", *map(str, arguments)],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    return time.perf_counter() - started


def ten_thousand_gpus(folder: Path) -> Path:
    """Writes a deployment with the case study's mix of 10,000 GPUs and a proportional link."""
    text = CASE_STUDY.read_text()
    for old, new in (("gpus = 32", "gpus = 3336"), ("gpus = 64", "gpus = 6664")):
        assert old in text
        text = text.replace(old, new)
    path = folder / "ten_thousand.toml"
    path.write_text(text.replace("gbps = 100\n", "gbps = 10400\n"))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="Runs per case (default 3).")
    repeats = parser.parse_args().repeats
    speeds = ",".join(str(2 * n) for n in range(1, 51))
    with tempfile.TemporaryDirectory() as folder:
        large = ten_thousand_gpus(Path(folder))
        cases = {
            "plan_case_study": ("plan", CASE_STUDY, "--json"),
            "sweep_50_link_speeds": ("plan", CASE_STUDY, "--sweep", f"links.0.gbps={speeds}"),
            "plan_10000_gpus": ("plan", large, "--json"),
            "plan_10000_gpus_exact": ("plan", large, "--reading", "exact", "--json"),
        }
        report = {}
        for name, arguments in cases.items():
            times = [wall_s(*arguments) for _ in range(repeats)]
            median = statistics.median(times)
            report[name] = {"wall_s": round(median, 3), "ratio_to_goal": round(median / GOAL_S, 3)}
    print(json.dumps({"goal_s": GOAL_S, "repeats": repeats, **report}, indent=2))


if __name__ == "__main__":
    main()
