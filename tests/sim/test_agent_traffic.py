"""The traffic of `bench/agents.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.cache.replay import block_hashes, conversation_hashes
from prfaas.config.trace import TRACE_BLOCK_TOKENS, parse_rows
from prfaas.sim.arrivals import replay


@pytest.fixture(scope="module")
def traffic() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    try:
        return importlib.import_module("_agent_traffic")
    finally:
        sys.path.pop(0)


def test_prompts_are_as_long_and_as_known_as_promised(traffic: Any) -> None:
    rows = traffic.agent_rows(traffic.AgentTraffic(sessions=40), 0.1, seed=3)
    mean = sum(row.input_length for row in rows) / len(rows)
    assert 65_000 < mean < 95_000
    assert 0.94 < traffic.seen_share(rows) < 0.97
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    lines = [msgspec.json.encode(row).decode() for row in rows]
    assert list(parse_rows(lines, TRACE_BLOCK_TOKENS)) == rows, "the format accepts the rows"


def test_the_next_prompt_begins_with_the_prompt_and_its_answer(traffic: Any) -> None:
    rows = traffic.agent_rows(traffic.AgentTraffic(sessions=1), 1.0, seed=5)
    assert len(rows) > 3
    for row, following in zip(rows, rows[1:], strict=False):
        whole = conversation_hashes(row) or block_hashes(row)
        assert block_hashes(following)[: len(whole)] == whole
    arrivals = replay(rows, 0, bucket_s=0.0)
    assert arrivals.answers == [conversation_hashes(row) for row in rows]
    assert arrivals.scaled(2.0).answers == arrivals.answers


def test_a_seed_gives_the_same_sessions_at_every_rate(traffic: Any) -> None:
    def lengths(rate: float, seed: int) -> list[tuple[int, int]]:
        rows = traffic.agent_rows(traffic.AgentTraffic(sessions=5), rate, seed)
        return sorted((row.input_length, row.output_length) for row in rows)

    assert lengths(1.0, 1) == lengths(0.01, 1) != lengths(1.0, 2)
