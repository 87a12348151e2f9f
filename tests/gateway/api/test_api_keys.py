from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import RequestError
from prfaas.gateway.api.api_keys import Keyring, TenantKey, salt_of


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_other_tenants_and_other_salts_are_other_salts(
    one: tuple[str, str], two: tuple[str, str]
) -> None:
    assert (salt_of(*one) == salt_of(*two)) == (one == two)


def test_everybody_is_let_in_where_there_are_no_keys() -> None:
    assert Keyring([]).tenant(None) == Keyring([]).tenant("Bearer x") == ""


@given(st.text())
def test_only_the_key_opens(other: str) -> None:
    ring = Keyring([TenantKey("sk-é", "one"), TenantKey("sk-2", "two")])
    assert ring.tenant("Bearer sk-é") == "one" and ring.tenant("Bearer sk-2") == "two"
    if other.strip() not in ("sk-é", "sk-2"):
        with pytest.raises(RequestError):
            ring.tenant(f"Bearer {other}")
