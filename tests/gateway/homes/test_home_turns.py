from collections import Counter
from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.homes.home_turns import MOST_AHEAD, HomeTurns
from prfaas.types import ClusterId

EAST, WEST, NORTH = (ClusterId(name) for name in ("east", "west", "north"))
SHARES = {EAST: 0.6, WEST: 0.3, NORTH: 0.1}
NOTHING: Mapping[ClusterId, int] = {}


def take(
    turns: HomeTurns, cached: Mapping[ClusterId, int], serving: Collection[ClusterId]
) -> ClusterId:
    chosen = turns.choose(cached, serving)
    assert chosen == turns.choose(cached, serving), "a choice takes no turn"
    turns.take(chosen, serving)
    return chosen


def test_requests_without_a_prefix_follow_the_shares_closely() -> None:
    turns = HomeTurns(SHARES)
    seen: Counter[ClusterId] = Counter()
    for number in range(1, 201):
        seen[take(turns, NOTHING, SHARES)] += 1
        for home, share in SHARES.items():
            assert abs(seen[home] - share * number) <= len(SHARES)


def test_a_conversation_stays_where_its_prefix_is() -> None:
    turns = HomeTurns(SHARES)
    assert {take(turns, {WEST: 640, EAST: 64}, SHARES) for _ in range(20)} == {WEST}


def test_a_prefix_that_all_prompts_begin_with_does_not_draw_all_of_them() -> None:
    turns = HomeTurns(SHARES)
    seen = Counter(take(turns, {WEST: 640}, SHARES) for _ in range(1000))
    assert abs(seen[WEST] - 300) <= MOST_AHEAD + len(SHARES)
    turns = HomeTurns(SHARES)
    seen = Counter(take(turns, dict.fromkeys(SHARES, 640), SHARES) for _ in range(1000))
    assert abs(seen[NORTH] - 100) <= len(SHARES), "where all have it, they take turns"


def test_a_home_that_cannot_serve_is_left_out_while_another_can() -> None:
    turns = HomeTurns(SHARES)
    assert {take(turns, {EAST: 640}, [WEST, NORTH]) for _ in range(9)} == {WEST, NORTH}
    assert {take(turns, NOTHING, []) for _ in range(20)} == set(SHARES), "all of them wait alike"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=300))
def test_debts_of_popular_homes_are_bounded(steps: list[tuple[bool, bool]]) -> None:
    """After any history, the other homes get their turns again soon."""
    turns = HomeTurns(SHARES)
    for cached, serving in steps:
        take(turns, {EAST: 64} if cached else {}, SHARES if serving else [EAST])
    later = Counter(take(turns, NOTHING, SHARES) for _ in range(400))
    assert all(later[home] >= share * 400 - 40 for home, share in SHARES.items())
