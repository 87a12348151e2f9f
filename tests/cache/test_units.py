from __future__ import annotations

from prfaas.cache.groups import rules_for
from prfaas.cache.units import Demand, Unit, closing_units, growing_units
from tests.cache.builders import BLOCK, SPECS

RULES = rules_for(SPECS["all"])  # full0, window0 (6 tokens), linear0, full1


def test_growing_units_start_behind_each_groups_own_run() -> None:
    units = list(growing_units(RULES, BLOCK, {0: 2, 3: 3}, tokens=14))
    assert units == [Unit((0, 2), 0), Unit((0, 3), 0), Unit((3, 3), 0)]


def test_closing_units_at_a_boundary() -> None:
    # 20 tokens: the window is 14 .. 19, so block 3 lacks its first two tokens.
    assert list(closing_units(RULES, BLOCK, 20)) == [
        Unit((1, 3), 2),
        Unit((1, 4), 0),
        Unit((2, 20), 0),
    ]


def test_closing_units_inside_a_block_and_near_the_start() -> None:
    assert list(closing_units(RULES, BLOCK, 18)) == [
        Unit((1, 3), 0),
        Unit((1, 4), 0),
        Unit((2, 18), 0),
    ]
    assert list(closing_units(RULES, BLOCK, 3)) == [Unit((1, 0), 0), Unit((2, 3), 0)]


def test_a_unit_needed_twice_takes_the_fuller_form() -> None:
    demand = Demand()
    demand.add(closing_units(RULES, BLOCK, 20))
    demand.add(closing_units(RULES, BLOCK, 16), keep=True)
    assert demand.units == {(1, 3): 0, (1, 4): 0, (2, 20): 0, (1, 2): 2, (2, 16): 0}
    assert demand.promotable == {(1, 3), (1, 2), (2, 16)}


def test_only_whole_blocks_are_kept() -> None:
    demand = Demand()
    demand.add(growing_units(RULES, BLOCK, {0: 1}, tokens=11), keep_before=2)
    assert set(demand.units) == {(0, 1), (0, 2)}
    assert demand.promotable == {(0, 1)}
