from __future__ import annotations

from prfaas.contracts.kvd_api import Role, SetRole
from prfaas.kvd.role import compare_and_set


def test_a_change_of_an_older_role_is_refused() -> None:
    first = compare_and_set(Role(), SetRole("prefill", 0))
    assert first == Role("prefill", 1)
    assert compare_and_set(first, SetRole("decode", 0)) is None
    assert compare_and_set(first, SetRole("decode", 1)) == Role("decode", 2)


def test_a_change_of_an_earlier_planner_is_refused() -> None:
    current = Role("prefill", 3)
    assert compare_and_set(current, SetRole("decode", 3, 6), 7) is None
    assert compare_and_set(current, SetRole("decode", 2, 8), 7) is None
    for epoch in (0, 7, 8):  # no election, the planner, and one that has no lease here
        assert compare_and_set(current, SetRole("decode", 3, epoch), 7) == Role("decode", 4)
