"""The gateway's credentials: which of them opens which path, and the tenants' cache salts.

Tenant keys open /v1/*, /tokenize and /detokenize. The operator key opens /prfaas/v1/* and /metrics,
the metrics key /metrics only.
The member key opens /prfaas/v1/register, for kvds, and /prfaas/v1/gateway, for other gateways.
Tenants do not share a cache: each tenant has its own salts.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from prfaas.contracts.gateway_api import REPORT_PATH
from prfaas.errors import InputError, RequestError
from prfaas.security.shared_key import SharedKey, bearer_token, digest
from prfaas.service.probes import PROBE_PATHS

# Probes have no key, and the document has no state.
OPEN_PATHS = PROBE_PATHS | {"/health", "/openapi.json"}
REGISTER = "/prfaas/v1/register"
METRICS = "/metrics"
_TENANT_PREFIX = "/v1/"
_TENANT_PATHS = frozenset({"/tokenize", "/detokenize"})
_SALT_BYTES = 32
_TAG_CHARACTERS = 16
_REGISTRATION_CLOSED = (
    "registration_closed",
    "kvds cannot register, because this gateway has no member key; set gateway.member_key_file, or "
    "list the node in the deployment file",
)
_REPORT_CLOSED = (
    "member_key_required",
    "other gateways cannot read this gateway's report, because it has no member key; set "
    "gateway.member_key_file",
)


@dataclass(frozen=True, slots=True)
class TenantKey:
    secret: str = field(repr=False)
    tenant: str


class Keyring:
    """The accepted tenant keys. Without keys every request is accepted."""

    def __init__(self, keys: Sequence[TenantKey]) -> None:
        self._keys = [(digest(key.secret), key.tenant) for key in keys]
        self.tenants = frozenset(key.tenant for key in keys) or frozenset({""})

    @property
    def locked(self) -> bool:
        return bool(self._keys)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of a request with this `Authorization` header. Raises `RequestError`."""
        if not self.locked:
            return ""
        given = bearer_token(authorization)
        if given is None:
            raise RequestError(
                401,
                "invalid_api_key",
                "the request has no API key; send `Authorization: Bearer KEY`",
            )
        offered = digest(given)
        # Every key is compared, each in constant time: the time of a response reveals nothing.
        found = [tenant for known, tenant in self._keys if hmac.compare_digest(known, offered)]
        if not found:
            raise RequestError(401, "invalid_api_key", "the API key is not valid")
        return found[0]


class GatewayCredentials:
    """Without any key every request is accepted, except those of members: then the gateway listens
    on loopback only."""

    def __init__(
        self,
        tenant_keys: Callable[[], Sequence[TenantKey]] = tuple,
        *,
        operator: SharedKey | None = None,
        metrics: SharedKey | None = None,
        member: SharedKey | None = None,
        salt_secret: bytes | None = None,
        insecure: bool = False,
        key_files: Sequence[Path] = (),
    ) -> None:
        """`tenant_keys` reads the keys, now and on `reload`, from `key_files`. `member` is reloaded
        by its owner.
        Without a `salt_secret` this process has its own."""
        self._read_tenant_keys = tenant_keys
        self._keyring = Keyring(tenant_keys())
        self._operator = operator
        self._metrics = metrics
        self._member = member
        self._salt_secret = salt_secret or secrets.token_bytes(_SALT_BYTES)
        self._insecure = insecure
        self._key_files = key_files

    @property
    def locked(self) -> bool:
        """Whether requests to the API need a key."""
        return self._keyring.locked

    @property
    def insecure(self) -> bool:
        """Whether the operator has accepted the risk of a gateway that protects itself less."""
        return self._insecure

    @property
    def operator(self) -> SharedKey | None:
        """The operator key; None: there is none."""
        return self._operator

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that have keys now. Without keys there is one, without a name."""
        return self._keyring.tenants

    def files(self) -> Sequence[Path]:
        shared = [key.files() for key in (self._operator, self._metrics) if key is not None]
        return (*self._key_files, *chain.from_iterable(shared))

    def reload(self) -> None:
        """Raises InputError, and keeps every key, when one of the files is not good."""
        keyring = Keyring(self._read_tenant_keys())
        if self.locked and not keyring.locked:
            raise InputError(
                "no API key is left, and every client would be accepted",
                where="gateway.keys",
                fix="keep one key, or restart the gateway",
            )
        shared = [key for key in (self._operator, self._metrics) if key is not None]
        read = [key.read_again() for key in shared]
        for key, keys in zip(shared, read, strict=True):
            key.use(keys)
        self._keyring = keyring

    def admit(self, path: str, authorization: str | None) -> str:
        """The tenant of a request; empty for requests without one. Raises RequestError with status
        401 or 403 when the credential does not open the path."""
        if path in OPEN_PATHS:
            return ""
        if path == REGISTER:
            self._admit_member(authorization, _REGISTRATION_CLOSED)
            return ""
        if path == REPORT_PATH:
            self._admit_member(authorization, _REPORT_CLOSED)
            return ""
        if path.startswith(_TENANT_PREFIX) or path in _TENANT_PATHS:
            return self._keyring.tenant(authorization)
        if path == METRICS and self._metrics is not None:
            if self._metrics.accepts(authorization):
                return ""
            if self._operator is None:  # also where tenants have no keys
                raise _unauthorized("the metrics key")
        self._admit_operator(authorization)
        return ""

    def _admit_member(self, authorization: str | None, closed: tuple[str, str]) -> None:
        """`closed`: code and message of the error where this gateway has no member key."""
        if self._member is not None:
            if not self._member.accepts(authorization):
                raise _unauthorized("the member key")
        elif not self._insecure:
            raise RequestError(403, *closed)

    def _admit_operator(self, authorization: str | None) -> None:
        if self._operator is not None:
            if not self._operator.accepts(authorization):
                raise _unauthorized("the operator key")
        elif self._keyring.locked:
            raise RequestError(
                403,
                "operator_key_required",
                "this path is closed, because the gateway has no operator key; set "
                "gateway.operator_key_file",
            )

    def tenant_tag(self, tenant: str) -> str:
        """Names the tenant to nodes and kvds, which divide what they share between tenants and need
        not know who they are. The same at all gateways with this salt secret."""
        if not tenant:
            return ""
        message = b"tenant tag" + tenant.encode()  # no salt has this message: theirs are JSON
        return hmac.new(self._salt_secret, message, "sha256").hexdigest()[:_TAG_CHARACTERS]

    def salt(self, tenant: str, client_salt: str) -> str:
        """The cache salt of a tenant's prompts; `client_salt` separates prompts of the same tenant.
        It is derived from a secret, so that neither a client nor a member can compute the salt of
        another tenant."""
        if not tenant and not client_salt:
            return ""
        message = msgspec.json.encode([tenant, client_salt])
        return hmac.new(self._salt_secret, message, "sha256").hexdigest()


def _unauthorized(what: str) -> RequestError:
    return RequestError(
        401,
        "unauthorized",
        f"this path requires {what}; send it as `Authorization: Bearer KEY`",
    )
