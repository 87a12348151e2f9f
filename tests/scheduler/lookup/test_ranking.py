from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.lookup.ranking import MAX_BLOCK, Ranking, lowest

keys = st.integers(-3, 3).map(float) | st.just(float("-inf"))
changes = st.tuples(st.integers(0, 40), keys | st.none())  # a number; None: removed
sets = st.integers(0, (1 << 41) - 1)


@given(st.lists(changes, max_size=200), st.lists(st.tuples(sets, keys), max_size=5))
def test_a_ranking_answers_like_a_sorted_list(
    steps: list[tuple[int, float | None]], questions: list[tuple[int, float]]
) -> None:
    ranking = Ranking()
    known: dict[int, float] = {}
    for number, key in steps:
        if key is None:
            ranking.remove(number)
            known.pop(number, None)
        else:
            ranking.put(number, key)
            known[number] = key
    ranking.check()
    ordered = sorted((key, number) for number, key in known.items())
    made_at_once = Ranking(reversed(ordered))
    made_at_once.check()
    assert len(ranking) == len(ordered)
    if ordered:
        assert ranking.least() == ordered[0]
    for nodes, key in questions:
        inside = [entry for entry in ordered if nodes >> entry[1] & 1]
        assert ranking.first(nodes) == (inside[0] if inside else None)
        assert ranking.first(nodes) == made_at_once.first(nodes)
        for _ in range(2):  # the second answer is remembered
            assert ranking.at_most(key) == sum(1 << n for k, n in ordered if k <= key)


def test_blocks_are_split_and_dropped() -> None:
    ranking = Ranking()
    count = 10 * MAX_BLOCK
    for number in range(count):
        ranking.put(number, float(number % 7))
    ranking.check()
    for number in range(0, count, 3):
        ranking.put(number, -1.0)
        ranking.remove(number + 1)
    ranking.check()
    assert lowest(ranking.at_most(-1.0)) == 0
    for number in range(count):
        ranking.remove(number)
    ranking.check()
    assert not ranking.nodes and ranking.first(-1) is None
