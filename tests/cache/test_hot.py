from __future__ import annotations

import pytest

from prfaas.cache.hashing import PromptHashes
from prfaas.cache.hot import HotPrefixes

SIZE = 4


def prompt(first: int) -> PromptHashes:
    return PromptHashes([first] * 12)


def scores(hot: HotPrefixes, now: float) -> list[float]:
    hot.check()
    return [prefix.score for prefix in hot.hottest(now)]


def test_counts_halve_with_time() -> None:
    hot = HotPrefixes(half_life_s=10.0, threshold=0.5)
    for _ in range(4):
        hot.observe(prompt(1), SIZE, 8, now=0.0)
    assert scores(hot, 0.0) == [4.0]
    assert scores(hot, 20.0) == [pytest.approx(1.0)]
    assert scores(hot, 40.0) == []
    hot.observe(prompt(1), SIZE, 8, now=20.0)
    assert scores(hot, 20.0) == [pytest.approx(2.0)]


def test_the_hottest_come_first_and_are_prefixes() -> None:
    hot = HotPrefixes(threshold=1.0)
    hot.observe(prompt(1), SIZE, 8, now=0.0)
    for _ in range(2):
        hot.observe(prompt(2), SIZE, 4, now=0.0)
    first, second = hot.hottest(0.0)
    assert (first.tokens, first.score, second.tokens) == (4, 2.0, 8)
    assert first.prompt.at(SIZE) == prompt(2).at(SIZE)[:1]


def test_the_coldest_makes_room() -> None:
    hot = HotPrefixes(half_life_s=1.0, capacity=2, threshold=0.0)
    hot.observe(prompt(1), SIZE, 4, now=0.0)
    hot.observe(prompt(2), SIZE, 4, now=5.0)
    hot.observe(prompt(3), SIZE, 4, now=6.0)
    assert {p.prompt.at(SIZE)[0] for p in hot.hottest(6.0)} == {
        prompt(2).at(SIZE)[0],
        prompt(3).at(SIZE)[0],
    }
