from __future__ import annotations

from prfaas.contracts.kvd_api import Role, SetRole
from prfaas.kvd.role import compare_and_set


def test_a_change_of_an_older_role_is_refused() -> None:
    first = compare_and_set(Role(), SetRole("prefill", 0))
    assert first == Role("prefill", 1)
    assert compare_and_set(first, SetRole("decode", 0)) is None
    assert compare_and_set(first, SetRole("decode", 1)) == Role("decode", 2)
