from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.groups import GroupRule, Hit, hybrid_hit, rules_for, unit_bytes
from prfaas.kvspec import block_bytes
from tests.cache.builders import BLOCK, FULL, LINEAR, SEEDED, SPECS, WINDOW

FULL_RULE, WINDOW_RULE, LINEAR_RULE = rules_for(SPECS["all"])[:3]


def holds(*blocks: int):  # type: ignore[no-untyped-def]
    return lambda block, unneeded: block in blocks


def test_rules_follow_the_spec() -> None:
    assert FULL_RULE == GroupRule(FULL.name, "full")
    assert WINDOW_RULE == GroupRule(WINDOW.name, "window", WINDOW.window)
    assert LINEAR_RULE == GroupRule(LINEAR.name, "linear")
    assert [rule.closes for rule in (FULL_RULE, WINDOW_RULE, LINEAR_RULE)] == [False, True, True]


def test_what_each_kind_needs() -> None:
    assert FULL_RULE.needs(5, BLOCK) == range(5)
    assert LINEAR_RULE.needs(5, BLOCK) == range(4, 5)
    # 20 tokens, the last 6 are 14 .. 19: blocks 3 and 4, of block 3 not the first two tokens.
    assert WINDOW_RULE.needs(5, BLOCK) == range(3, 5)
    assert WINDOW_RULE.first_token(5, BLOCK) == 14
    assert [r.needs(0, BLOCK) for r in (FULL_RULE, WINDOW_RULE, LINEAR_RULE)] == [range(0)] * 3


def test_a_window_of_one_token_needs_nothing_of_the_past() -> None:
    rule = GroupRule("w", "window", 1)
    assert list(rule.needs(3, BLOCK)) == []
    assert rule.longest(holds(), 3, BLOCK) == 3


def test_full_attention_takes_the_longest_run() -> None:
    assert FULL_RULE.longest(holds(0, 1, 3), 4, BLOCK) == 2


def test_a_linear_state_fits_its_own_length_only() -> None:
    assert LINEAR_RULE.longest(holds(1), 4, BLOCK) == 2
    assert LINEAR_RULE.longest(holds(1), 1, BLOCK) == 0


def test_a_window_needs_its_last_blocks_only() -> None:
    assert WINDOW_RULE.longest(holds(3, 4), 5, BLOCK) == 5
    assert WINDOW_RULE.longest(holds(2, 4), 5, BLOCK) == 0
    assert WINDOW_RULE.longest(holds(0), 5, BLOCK) == 1  # a prompt shorter than the window


def test_an_incomplete_window_block_serves_only_the_length_it_was_saved_for() -> None:
    def has(block: int, unneeded: int) -> bool:
        return block == 4 or (block == 3 and unneeded >= 2)

    assert WINDOW_RULE.longest(has, 5, BLOCK) == 5
    # After four blocks all of block 3 is needed, and its first two tokens are not there.
    assert WINDOW_RULE.longest(lambda b, u: b == 2 or has(b, u), 4, BLOCK) == 0


def test_the_hit_is_what_every_group_can_serve() -> None:
    held = {0: {0, 1, 2, 3, 4}, 1: {1, 4}}
    rules = (FULL_RULE, LINEAR_RULE)
    assert hybrid_hit(rules, lambda g, b, u: b in held[g], 5, BLOCK) == Hit(5, 5)
    assert hybrid_hit(rules, lambda g, b, u: b in held[g], 4, BLOCK) == Hit(2, 4)


@SEEDED
@given(
    held=st.lists(st.sets(st.integers(0, 7)), min_size=4, max_size=4),
    incomplete=st.sets(st.integers(0, 7)),
    limit=st.integers(0, 8),
)
def test_the_hit_equals_brute_force(held: list[set[int]], incomplete: set[int], limit: int) -> None:
    rules = rules_for(SPECS["all"])

    def has(group: int, block: int, unneeded: int) -> bool:
        return block in held[group] and (unneeded >= 2 or not (group == 1 and block in incomplete))

    def serves(length: int) -> bool:
        return all(
            has(group, block, max(0, rule.first_token(length, BLOCK) - block * BLOCK))
            for group, rule in enumerate(rules)
            for block in rule.needs(length, BLOCK)
        )

    hit = hybrid_hit(rules, has, limit, BLOCK)
    assert hit.blocks == max(length for length in range(limit + 1) if serves(length))
    runs = [
        next((b for b in range(limit) if b not in held[group]), limit)
        for group, rule in enumerate(rules)
        if not rule.closes
    ]
    assert hit.attention == min(runs)


def test_without_full_attention_nothing_is_lost() -> None:
    assert hybrid_hit((LINEAR_RULE,), lambda g, b, u: b == 1, 4, BLOCK) == Hit(2, 2)


def test_unit_bytes_are_the_logical_blocks() -> None:
    spec = SPECS["all"]
    assert unit_bytes(spec, BLOCK) == tuple(block_bytes(group, BLOCK) for group in spec.groups)
