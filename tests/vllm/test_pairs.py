"""Unlike engines, as `bench/pairs.py` runs them: a part of its grid, with every axis."""

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
# Ranks, states and latents. `test_unlike_engines.py` has windows and vLLM's prefix cache. Stages,
# block sizes, the gateway, more ranks than KV heads, and experts are of the grid.
CASES = [
    pytest.param("falcon-h1", ("node:tp2",), False),
    pytest.param("deepseek-v3", ("node:tp1",), False, marks=pytest.mark.grid),
    pytest.param("falcon-h1", ("node:tp2", "tp2:b64"), True, marks=pytest.mark.grid),
    pytest.param("qwen3", ("node:pp2",), False, marks=pytest.mark.grid),
    pytest.param("falcon-h1", ("node:tp4",), False, marks=pytest.mark.grid),
    pytest.param("gemma3", ("node:b64", "b64:b256"), False, marks=pytest.mark.grid),
    pytest.param("gpt-oss", ("node:tp2",), False, marks=pytest.mark.grid),
]


@pytest.mark.parametrize(("arch", "pairs", "with_gateway"), CASES)
def test_a_pair_hands_over_both_ways(
    tmp_path: Path, arch: str, pairs: tuple[str, ...], with_gateway: bool
) -> None:
    """Tokens are the receiver's own, log-probabilities within 2e-3, bytes those of `kv_bytes`;
    second turns send what is new, and a turn back resumes from what crossed."""
    grid = bench("pairs")
    setup = grid.Setup(Path(sys.executable), tmp_path, "auto", "both", time.monotonic() + PAIRS_S)
    plan = grid.Plan(LENGTHS, 1, with_gateway, "both")
    wanted = [grid.parse_pair(pair) for pair in pairs]
    with closing(grid.run_model(arch, wanted, setup, plan)) as found:
        results = list(found)
    assert len(results) == 2 * len(pairs)
    failed = [one for one in results if not one.get("ok")]
    assert not failed
    for one in results:
        assert one["form"] == "canonical"  # the engines of each pair differ
        assert one["tokens_equal"] == one["tokens_equal_node"] == one["tried"] > 0
