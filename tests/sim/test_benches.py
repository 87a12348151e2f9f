"""The benchmarks run, print what they state, and fill the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_bench(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / f"{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {
            "timestamp": 3000 * (k // 8),
            "input_length": 512 * (6 + 9 * (k % 5)),
            "output_length": 60,
            "hash_ids": [1000 * (k % 50) + block for block in range(6 + 9 * (k % 5))],
        }
        for k in range(60)
    ]
    path = tmp_path_factory.mktemp("trace") / "tiny.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_agents_with_and_without_kept_answers() -> None:
    done = run_bench("agents", "--sessions", 6, "--seeds", 1, "--policy", "local")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (run,) = found["runs"]
    assert run["prompt_tokens"] > 50_000 and run["seen_before"] > 0.9
    shares = found["computed_share"]
    assert shares["kept"] < shares["without"] < 0.2
    assert found["computed_ratio"]["kept"] == round(shares["kept"] / shares["without"], 3)
    assert run["kept"]["alone"] == 0  # only `adaptive` lets decode nodes serve by choice


def test_an_impossible_load_is_named() -> None:
    done = run_bench("agents", "--load", 1.5)
    assert done.returncode != 0 and "--load" in done.stderr


@pytest.mark.grid
def test_speed_beside_a_peer(tmp_path: Path, trace: Path) -> None:
    peer = tmp_path / "some_peer.py"
    peer.write_text(
        "import json, sys\n"
        "rows = open(sys.argv[1]).read().splitlines()\n"
        "print('noise'); print(json.dumps({'wall_s': 0.5, 'requests': len(rows)}))\n"
    )
    done = run_bench(
        "simulate", "--requests", 2000, "--trace", trace, "--peers", peer, "--rounds", 1
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["poisson"]) == ["20", "200", "2000"]
    assert all(run["us_per_request"] > 0 for run in report["poisson"].values())
    there = report["trace"]["peers"]["some_peer"]
    assert (there["wall_s"], there["requests"]) == (0.5, 60)
    assert there["cpu_s"] > 0
    for policy in ("paper", "adaptive"):
        run = report["trace"][policy]
        assert run["requests"] == 60
        assert run["wall_s_ratio_to_peer"] == pytest.approx(run["wall_s"] / 0.5, rel=0.01)
        assert run["peak_memory_mb"] > 10


def test_a_peer_that_fails_is_named(tmp_path: Path, trace: Path) -> None:
    peer = tmp_path / "broken_peer.py"
    peer.write_text("raise SystemExit('no such library')\n")
    done = run_bench(
        "simulate", "--requests", 200, "--trace", trace, "--peers", peer, "--rounds", 1
    )
    assert done.returncode != 0
    assert "broken_peer" in done.stderr and "no such library" in done.stderr


def test_a_part_of_the_comparison_runs_on_other_seeds(trace: Path) -> None:
    done = run_bench(
        "policies",
        "--trace",
        trace,
        "--seeds",
        2,
        "--first-seed",
        7,
        "--only",
        "burst",
        "--workers",
        1,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (tiny,) = report["traces"].values()
    assert report["first_seed"] == 7 and tiny["calm"] == []
    found = {(row["stress"], row["seed"], row["policy"]) for row in tiny["stress"]}
    assert found == {
        (f"burst, {load}", seed, policy)
        for load in ("80%", "95%")
        for seed in (7, 8)
        for policy in ("paper", "adaptive")
    }


@pytest.mark.grid
def test_the_times_of_two_workers_and_of_one_are_compared(trace: Path) -> None:
    options = ("--seeds", 1, "--only", "burst", "--workers", 2, "--compare-workers")
    done = run_bench("policies", "--trace", trace, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] and found["workers"] == 2
    assert found["one_worker_s"] > 0 and found["workers_s"] > 0 and found["ratio"] > 0


@pytest.mark.slow
def test_policies_are_compared_and_the_page_is_filled(tmp_path: Path, trace: Path) -> None:
    done = run_bench("policies", "--trace", trace, "--seeds", 2)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (tiny,) = report["traces"].values()
    assert len(tiny["calm"]) == 2 * 3 * 4  # seeds, loads, policies
    assert len(tiny["stress"]) == 2 * 2 * 4 * 2  # seeds, loads, stresses, policies
    for difference in tiny["calm_difference"] + tiny["stress_difference"]:
        assert difference["low"] <= difference["mean"] <= difference["high"]
    loads = {(row["load"], row["seed"], row["policy"]): row for row in tiny["calm"]}
    paper, adaptive = loads[0.8, 0, "paper"], loads[0.8, 0, "adaptive"]
    other = loads[0.8, 1, "adaptive"]["ttft_mean_s"] / loads[0.8, 1, "paper"]["ttft_mean_s"] - 1
    (found,) = (
        d for d in tiny["calm_difference"] if (d["load"], d["metric"]) == (0.8, "ttft_mean_s")
    )
    mean = (adaptive["ttft_mean_s"] / paper["ttft_mean_s"] - 1 + other) / 2
    assert found["mean"] == pytest.approx(mean)

    results = tmp_path / "results.json"
    results.write_text(done.stdout)
    page = tmp_path / "docs" / "simulator.md"
    page.parent.mkdir()
    names = ("facts", "calm tiny", "calm difference tiny", "stress tiny", "stress difference tiny")
    page.write_text("".join(f"<!-- begin {n} -->\nold\n<!-- end {n} -->\n" for n in names))
    written = run_bench("policies_docs", results, "--docs", page.parent)
    assert written.returncode == 0, written.stderr
    text = page.read_text()
    assert "\nold\n" not in text
    assert f"{tiny['saturated_rps']:.2f}" in text
    assert (page.parent / "img" / "simulator-load.png").read_bytes().startswith(b"\x89PNG")
    page.write_text("nothing to fill")
    assert (
        "no place for 'facts'"
        in run_bench("policies_docs", results, "--docs", tmp_path / "docs").stderr
    )


@pytest.mark.slow
def test_scale_compares_the_first_size_with_the_last() -> None:
    done = run_bench("scale", "--requests", 200, "--nodes", 12, "--nodes", 24)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("poisson paper", "poisson adaptive", "sessions paper", "sessions adaptive"):
        few, many = found[name]["12"], found[name]["24"]
        assert found[name]["ratio"] > 0 and few["requests"] == many["requests"] > 100
        assert (many["prefix_reuse"] > 0.3) == name.startswith("sessions")


@pytest.mark.slow
def test_random_regions_are_compared_with_their_plans() -> None:
    done = run_bench("regions", "--deployments", 1, "--seed", 2, "--seconds", 100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (row,) = report["deployments"]
    assert (row["seed"], row["pd"], row["prfaas"]) == (2, 4, 2)
    assert report["least"] == {policy: row[policy] for policy in ("paper", "adaptive")}
    assert 0.5 < min(report["least"].values()) < 1.05
