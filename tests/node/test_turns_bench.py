"""What the benchmark of conversations makes of its turns."""

from __future__ import annotations

from typing import Any

from tests.benches import bench

turns = bench("turns")


def turn(cached: int, ttft_s: float, answer: list[int]) -> Any:
    kept = turns.Served(answer, ttft_s, 700, cached)
    plain = turns.Served(answer, 2.0, 700, 100)
    return turns.Turn([1] * 700, 100, kept, plain)


def test_a_turn_may_compute_its_new_tokens_and_a_block() -> None:
    found = [turn(0, 2.0, [1]), turn(536, 1.0, [2]), turn(540, 0.5, [3])]
    result = turns.summary(found, [[1], [2], [3]])
    assert result["ttft_ratio"] == 3.0  # the median of 2 and 4
    assert [one["computed_prompt_tokens"] for one in result["turns"]] == [700, 164, 160]
    assert turns.failures(result) == []


def test_other_tokens_and_more_work_are_failures() -> None:
    found = [turn(0, 2.0, [1]), turn(535, 1.0, [2])]
    result = turns.summary(found, [[9], [2]])
    assert [one["equal"] for one in result["turns"]] == [False, True]
    first, second = turns.failures(result)
    assert "answers differ" in first and "165 prompt tokens" in second
