from __future__ import annotations

import json
import lzma
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import LRU
from prfaas.cache.groups import unit_bytes
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.replay import ReplayResult, replay, with_answers
from prfaas.cache.storage.arena import choose_layout
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow
from prfaas.errors import InputError
from prfaas.studies.parallel.workers import Workers
from tests.cache.builders import SPECS
from tests.waiting import PATIENCE_S

BENCH = Path(__file__).parents[2] / "bench" / "cache.py"
KEYS = {
    "token_hit_rate",
    "ideal_hit_rate",
    "reuse_lost_tokens",
    "bytes_by_group",
    "evictions",
    "ops_per_s",
}


def row(ids: list[int], tail: int = 0, at_ms: int = 0) -> TraceRow:
    whole = len(ids) - (tail > 0)
    return TraceRow(at_ms, whole * TRACE_BLOCK_TOKENS + tail, 5, ids)


def pool(checkpoints: str = "default", pages: int | None = None) -> HybridPrefixPool:
    spec = SPECS["hybrid"]
    layout = choose_layout(unit_bytes(spec, TRACE_BLOCK_TOKENS))
    return HybridPrefixPool(
        spec,
        TRACE_BLOCK_TOKENS,
        PoolStorage(layout, pages),
        eviction=LRU(),
        checkpoints=checkpoint_policy(checkpoints, TRACE_BLOCK_TOKENS),
    )


def conversations(count: int, seed: int = 0) -> list[TraceRow]:
    """Users who share a system prompt, talk in turns and sometimes start over."""
    rng = random.Random(seed)
    fresh = iter(range(100, 10**9))
    system = list(range(12))
    talks: list[list[int]] = [list(system) for _ in range(8)]
    rows = []
    for number in range(count):
        user = rng.randrange(len(talks))
        if rng.random() < 0.2:
            talks[user] = list(system)
        talks[user] += [next(fresh) for _ in range(rng.randint(1, 6))]
        rows.append(row([*talks[user], next(fresh)], tail=100, at_ms=1000 * number))
    return rows


def test_hits_and_the_ideal_are_counted_in_tokens() -> None:
    rows = [row([1, 2, 3], tail=10), row([1, 2, 3], tail=10), row([1, 9])]
    result = replay(rows, pool("every:1"))
    assert result.input_tokens == 2 * (1024 + 10) + 1024
    assert result.ideal_tokens == (1024 + 10) + 512
    assert result.hit_tokens == 1024 + 512
    assert result.lost_tokens == 0


def test_last_boundary_loses_what_diverges_inside() -> None:
    rows = [row([1, 2, 3]), row([1, 2, 9]), row([1, 2, 8])]
    assert replay(rows, pool("last")).lost_tokens == 2 * 1024
    branch = replay(rows, pool("branch"))
    assert (branch.lost_tokens, branch.hit_tokens) == (1024, 1024)
    assert replay(rows, pool("every:1")).lost_tokens == 0


def test_no_policy_beats_the_ideal_and_every_block_reaches_it() -> None:
    rows = conversations(200)
    results = {name: replay(rows, pool(name)) for name in ("last", "branch", "default", "every:1")}
    rates = [results[name].token_hit_rate for name in ("last", "branch", "default", "every:1")]
    assert rates == sorted(rates)
    ideal = results["every:1"]
    assert ideal.token_hit_rate == pytest.approx(ideal.ideal_hit_rate)
    assert ideal.lost_tokens == 0
    assert results["last"].lost_tokens > 0


def test_peak_bytes_are_real_sizes() -> None:
    result = replay([row([1, 2]), row([3])], pool("last"))
    layout = pool().layout
    page = layout.page_bytes
    assert result.peak_bytes_by_group == {
        "full0": 3 * layout.pages(0) * page,
        "linear0": 2 * layout.pages(1) * page,
    }
    assert result.evicted_blocks == 0


def test_a_prompt_larger_than_the_pool_is_refused_but_served() -> None:
    layout = pool().layout
    small = pool("last", pages=2 * layout.pages(0) + layout.pages(1))
    result = replay([row([1, 2]), row([1, 2, 3, 4]), row([1, 2])], small)
    assert result.refused == 1
    assert result.hit_tokens == 2 * 1024


def turn(ids: list[int], tail: int, output: int) -> TraceRow:
    return TraceRow(0, (len(ids) - 1) * TRACE_BLOCK_TOKENS + tail, output, ids)


def test_an_answer_is_found_in_the_next_prompt() -> None:
    rows = [
        turn([1, 2, 3], 10, 1100),  # 1,034 tokens and an answer up to 2,134: blocks 2 and 3
        turn([1, 2, 3], 20, 10),  # the same prompt again, which is too short to contain the answer
        turn([1, 2, 4, 5, 6], 200, 10),
        turn([1, 2, 7, 8, 9], 300, 400),
    ]
    first, again, second, other = with_answers(rows)
    assert first.answer_hash_ids == [4, 5], "the first prompt that is long enough"
    assert again.answer_hash_ids == second.answer_hash_ids == [], "no block is completed"
    assert len(other.answer_hash_ids) == 1 and other.answer_hash_ids[0] > 9, "never continued"
    alone = with_answers(rows, continued=False)[0].answer_hash_ids
    assert len(alone) == 2 and min(alone) > 9


def test_a_prompt_resumes_after_the_answer_that_it_contains() -> None:
    rows = with_answers([turn([1, 2, 3], 10, 1100), turn([1, 2, 4, 5, 6], 200, 10)])
    here = pool("last")
    here.set_aside(1_000)
    result = replay(rows, here)
    assert (result.hit_tokens, result.kept_answers) == (4 * TRACE_BLOCK_TOKENS, 1)
    assert replay(rows, pool("last")).hit_tokens == 2 * TRACE_BLOCK_TOKENS


def write(path: Path, rows: list[TraceRow]) -> Path:
    lines = "".join(
        json.dumps(
            {
                "timestamp": r.timestamp,
                "input_length": r.input_length,
                "output_length": 5,
                "hash_ids": r.hash_ids,
            }
        )
        + "\n"
        for r in rows
    )
    data = lines.encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def test_a_trace_without_rows() -> None:
    with pytest.raises(InputError, match="no rows"):
        replay([], pool())


def run_bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_the_benchmark_prints_the_promised_keys(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.xz", conversations(60))
    done = run_bench(
        "--trace", trace, "--model", "kimi-linear-48b-a3b", "--capacity-gb", "inf", "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == KEYS
    assert 0 < result["token_hit_rate"] <= result["ideal_hit_rate"] < 1
    assert set(result["bytes_by_group"]) == {"full0", "linear0"}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--model", "nonsense"),
        ("--capacity-gb", "-1"),
        ("--capacity-gb", "nan"),
        ("--checkpoints", "every:0"),
        ("--evict", "fifo"),
    ],
)
def test_the_benchmark_refuses_nonsense(tmp_path: Path, wrong: tuple[str, str]) -> None:
    trace = write(tmp_path / "t.jsonl", conversations(3))
    options = {"--trace": str(trace), "--model": "case-study-1t", wrong[0]: wrong[1]}
    done = run_bench(*(text for pair in options.items() for text in pair))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_the_benchmark_compares_kept_answers(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", conversations(40))
    compare = runpy.run_path(str(BENCH))["compare_answers"]
    result = compare(trace, "kimi-linear-48b-a3b", "default", "cost", Workers(1))
    assert set(result["rates"]) == {"not_kept", "kept", "kept_in_vain"}
    for rates in result["rates"].values():
        assert set(rates) == {"9.8%", "9.9%", "10.0%", "10.1%", "10.2%", "mean"}


@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.1])
def test_the_default_policies_beat_the_baseline_when_memory_is_scarce(fraction: float) -> None:
    bench = runpy.run_path(str(BENCH))
    rows = conversations(600, seed=3)
    model = "kimi-linear-48b-a3b"

    def run(capacity: float, checkpoints: str, evict: str) -> ReplayResult:
        result: ReplayResult = bench["run_replay"](rows, model, capacity, checkpoints, evict)[0]
        return result

    working_set = sum(run(float("inf"), "default", "cost").peak_bytes_by_group.values())
    ours = run(fraction * working_set, "default", "cost")
    baseline = run(fraction * working_set, "last", "lru")
    assert ours.token_hit_rate > baseline.token_hit_rate
    assert ours.evicted_blocks > 0 or fraction == 0.5
