from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

BENCH = Path(__file__).parents[2] / "bench" / "index.py"


def run_bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
    )


def test_the_benchmark_measures_us_and_a_peer(tmp_path: Path) -> None:
    peer = tmp_path / "some_peer.py"
    peer.write_text("print('built'); print('{\"tokens\": 8192, \"p50_ms\": 1.5}')\n")
    done = run_bench("--blocks", 10_240, "--repeats", 1, "--peers", peer)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["blocks"] == 10_240
    assert set(result["match_ms"]) == {"8192", "32768", "131072"}
    assert all(ms > 0 for forms in result["match_ms"].values() for ms in forms.values())
    assert result["events_blocks_per_s"] > 0
    assert result["peers"] == {"some_peer": [{"tokens": 8192, "p50_ms": 1.5}]}


def test_a_peer_that_fails_is_named(tmp_path: Path) -> None:
    peer = tmp_path / "broken_peer.py"
    peer.write_text("raise SystemExit('no such library')\n")
    done = run_bench("--blocks", 10_240, "--repeats", 1, "--peers", peer)
    assert done.returncode != 0
    assert "broken_peer" in done.stderr and "no such library" in done.stderr
