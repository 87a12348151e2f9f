"""Unlike engines, as `prfaas bench pairs` runs them: a part of its grid, with every axis."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.benches import bench

pytestmark = pytest.mark.timeout(1200)  # servers start and stop within it

LENGTHS = (2, 65, 130, 300)
PAIRS_S = 1_000.0
# More ranks than KV heads; block sizes; stages; states, windows; the gateway. Experts and latents
# are of the grid. `test_unlike_engines.py` has vLLM's prefix cache.
CASES = [
    pytest.param("falcon-h1", "node:tp4", True),
    pytest.param("gemma3", "node:b64", False),
    pytest.param("qwen3", "node:pp2", False),
    pytest.param("gpt-oss", "node:tp2", False, marks=pytest.mark.grid),
    pytest.param("deepseek-v3", "node:tp1", False, marks=pytest.mark.grid),
]


@pytest.mark.parametrize(("arch", "pair", "with_gateway"), CASES)
def test_a_pair_hands_over_both_ways(
    tmp_path: Path, arch: str, pair: str, with_gateway: bool
) -> None:
    """Tokens are the receiver's own, log-probabilities within 2e-3, bytes those of `kv_bytes`;
    second turns send what is new, and a turn back resumes from what crossed."""
    grid = bench("pairs")
    setup = grid.Setup(
        Path(sys.executable), tmp_path, "canonical", "both", time.monotonic() + PAIRS_S
    )
    plan = grid.Plan(LENGTHS, 1, with_gateway, "both")
    with closing(grid.run_model(arch, [grid.parse_pair(pair)], setup, plan)) as found:
        results = list(found)
    assert len(results) == 2
    failed = [one for one in results if not one.get("ok")]
    assert not failed
    for one in results:
        assert one["tokens_equal"] == one["tokens_equal_node"] == one["tried"] > 0
