"""API keys and their tenants. Tenants do not share a cache: each tenant has its own salts. Pure."""

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
    """The accepted API keys. Without keys every request is accepted."""

    def __init__(self, keys: Sequence[TenantKey]) -> None:
        self._keys = [(_digest(key.secret), key.tenant) for key in keys]

    @property
    def locked(self) -> bool:
        return bool(self._keys)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of a request with this `Authorization` header. Raises `RequestError`."""
        if not self.locked:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise RequestError(
                401,
                "invalid_api_key",
                "the request has no API key; send `Authorization: Bearer KEY`",
            )
        offered = _digest(given.strip())
        # Every key is compared, each in constant time: the time of a response reveals nothing.
        found = [tenant for digest, tenant in self._keys if hmac.compare_digest(digest, offered)]
        if not found:
            raise RequestError(401, "invalid_api_key", "the API key is not valid")
        return found[0]


def _digest(secret: str) -> bytes:
    """Digests have equal length. A header may contain bytes that are not UTF-8."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def salt_of(tenant: str, client_salt: str) -> str:
    """The cache salt of a tenant's prompts; `client_salt` separates prompts of the same tenant. It
    is derived, so that a client cannot send another tenant's salt."""
    if not tenant and not client_salt:
        return ""
    return hmac.new(_PURPOSE, msgspec.json.encode([tenant, client_salt]), "sha256").hexdigest()
