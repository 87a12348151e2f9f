from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import RequestError
from prfaas.gateway.api.credentials import GatewayCredentials, Keyring, TenantKey
from prfaas.security.shared_key import SharedKey


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_each_pair_of_tenant_and_client_salt_has_its_own_salt(
    one: tuple[str, str], two: tuple[str, str]
) -> None:
    credentials = GatewayCredentials(salt_secret=b"of this deployment")
    assert (credentials.salt(*one) == credentials.salt(*two)) == (one == two)


def test_without_keys_every_request_is_accepted() -> None:
    assert Keyring([]).tenant(None) == Keyring([]).tenant("Bearer x") == ""


@given(st.text())
def test_only_the_exact_key_is_accepted(other: str) -> None:
    ring = Keyring([TenantKey("sk-é", "one"), TenantKey("sk-2", "two")])
    assert ring.tenant("Bearer sk-é") == "one" and ring.tenant("Bearer sk-2") == "two"
    if other.strip() not in ("sk-é", "sk-2"):
        with pytest.raises(RequestError):
            ring.tenant(f"Bearer {other}")


@given(st.text(min_size=1), st.text(min_size=1))
def test_each_tenant_has_its_own_tag_which_does_not_name_it(one: str, two: str) -> None:
    credentials = GatewayCredentials(salt_secret=b"of this deployment")
    other = GatewayCredentials(salt_secret=b"of another deployment")
    assert (credentials.tenant_tag(one) == credentials.tenant_tag(two)) == (one == two)
    assert credentials.tenant_tag(one) != other.tenant_tag(one)
    assert credentials.tenant_tag("") == ""


@pytest.mark.parametrize("operator", [SharedKey(["operator"]), None])
def test_the_metrics_key_opens_the_metrics_only(operator: SharedKey | None) -> None:
    keys = [TenantKey("tenant", "one")]
    credentials = GatewayCredentials(
        lambda: keys,
        operator=operator,
        metrics=SharedKey(["metrics"]),
        member=SharedKey(["member"]),
    )
    assert credentials.admit("/metrics", "Bearer metrics") == ""
    others = ("/prfaas/v1/state", "/prfaas/v1/drain", "/v1/models", "/prfaas/v1/register")
    for path, key in (*((path, "metrics") for path in others), ("/metrics", "tenant")):
        with pytest.raises(RequestError):
            credentials.admit(path, f"Bearer {key}")
