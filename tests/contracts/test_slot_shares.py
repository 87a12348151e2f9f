from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.slot_shares import KEPT_FREE, has_slot, held_slots, kept_free

SLOTS = st.integers(1, 64)


def filled(order: list[int], slots: int) -> Counter[int]:
    """What tenants hold that ask in this order and keep what they get."""
    held: Counter[int] = Counter()
    for tenant in order:
        if has_slot(held.total(), held[tenant], slots):
            held[tenant] += 1
    return held


def test_little_is_kept_free_of_few_slots() -> None:
    kept = {slots: kept_free(slots) for slots in (0, 1, 2, 3, 4, 8, 16, 1000)}
    assert kept == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 8: 2, 16: KEPT_FREE, 1000: KEPT_FREE}


def test_a_tenant_that_asks_for_everything_leaves_slots_to_those_that_come_later() -> None:
    asked = [tenant for tenant in range(6) for _ in range(100)]
    assert filled(asked, 16) == {0: 12, 1: 2, 2: 1, 3: 1}
    assert filled(asked, 2) == {0: 1, 1: 1}
    assert filled(asked, 1) == {0: 1}


@given(st.lists(st.integers(0, 4), max_size=200), SLOTS)
def test_a_tenant_without_a_slot_finds_one_beside_any_other(order: list[int], slots: int) -> None:
    held = filled(order, slots)
    assert held.total() <= slots
    if slots > 1 and len(held) == 1:
        assert has_slot(held.total(), 0, slots)
    for own in held.values():
        assert own <= max(1, slots - kept_free(slots))


@given(st.lists(st.integers(0, 40), max_size=6), SLOTS, st.integers(0, 70))
def test_what_tenants_hold_is_what_they_get_one_after_the_other(
    wanted: list[int], slots: int, others: int
) -> None:
    """The tenants that want most first."""
    held: Counter[int] = Counter()
    for tenant, sequences in enumerate(sorted(wanted, reverse=True)):
        for _ in range(sequences):
            if has_slot(min(others, slots) + held.total(), held[tenant], slots):
                held[tenant] += 1
    assert held_slots(wanted, slots, others) == min(others, slots) + held.total()
