"""API keys and their tenants. Tenants share no cache: each has salts of its own. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from prfaas.errors import RequestError

_PURPOSE = b"prfaas cache salt"


@dataclass(frozen=True, slots=True)
class TenantKey:
    secret: str
    tenant: str


class Keyring:
    """Without keys everybody is let in."""

    def __init__(self, keys: Sequence[TenantKey]) -> None:
        self._keys = [(_digest(key.secret), key.tenant) for key in keys]

    @property
    def locked(self) -> bool:
        return bool(self._keys)

    def tenant(self, authorization: str | None) -> str:
        """Of a request with this `Authorization` header."""
        if not self.locked:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise RequestError(
                401, "invalid_api_key", "no API key; send it as `Authorization: Bearer`"
            )
        offered = _digest(given.strip())
        # Every key is compared, and each in constant time: nothing to learn from how long it took.
        found = [tenant for digest, tenant in self._keys if hmac.compare_digest(digest, offered)]
        if not found:
            raise RequestError(401, "invalid_api_key", "this API key is not known here")
        return found[0]


def _digest(secret: str) -> bytes:
    """Of equal length for all. A header may hold bytes that are no text."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def salt_of(tenant: str, client_salt: str) -> str:
    """The salt of a tenant's prompts; `client_salt` keeps some of them apart from others. Derived,
    so that no client can name another tenant's."""
    if not tenant and not client_salt:
        return ""
    return hmac.new(_PURPOSE, msgspec.json.encode([tenant, client_salt]), "sha256").hexdigest()
