from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError, RequestError
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


@pytest.mark.parametrize("key", [None, "Bearer other"])
def test_the_metrics_key_protects_the_metrics_also_without_tenant_keys(key: str | None) -> None:
    credentials = GatewayCredentials(metrics=SharedKey(["metrics"]), insecure=True)
    assert credentials.admit("/metrics", "Bearer metrics") == ""
    assert credentials.admit("/prfaas/v1/state", key) == "", "as without any key"
    with pytest.raises(RequestError, match="metrics key"):
        credentials.admit("/metrics", key)


def accepts(credentials: GatewayCredentials, path: str, key: str) -> bool:
    try:
        credentials.admit(path, f"Bearer {key}")
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("bad", ["operator", "metrics"])
def test_a_reload_with_one_bad_file_changes_no_key(tmp_path: Path, bad: str) -> None:
    def write(name: str, key: str, mode: int = 0o600) -> Path:
        file = tmp_path / name
        file.write_text(key)
        file.chmod(mode)
        return file

    tenants = [TenantKey("sk-one", "one"), TenantKey("sk-two", "two")]
    names = ("operator", "metrics")
    operator, metrics = (SharedKey.read(write(name, name[0] * 32)) for name in names)
    credentials = GatewayCredentials(lambda: list(tenants), operator=operator, metrics=metrics)
    revoked = tenants.pop()
    for name in names:
        write(name, name[0].upper() * 32, 0o644 if name == bad else 0o600)
    paths = {"operator": "/prfaas/v1/state", "metrics": "/metrics"}
    with pytest.raises(InputError, match=bad):
        credentials.reload()
    for name, path in paths.items():
        assert accepts(credentials, path, name[0] * 32)
        assert not accepts(credentials, path, name[0].upper() * 32)
    assert accepts(credentials, "/v1/models", revoked.secret)
    (tmp_path / bad).chmod(0o600)
    credentials.reload()
    for name, path in paths.items():
        assert accepts(credentials, path, name[0].upper() * 32)
        assert not accepts(credentials, path, name[0] * 32)
    assert not accepts(credentials, "/v1/models", revoked.secret)
