"""Tenants: their weights, and their parts of the gateway's limits. Bookkeeping only.

With one tenant, every limit is the deployment's. With several tenants, a limit has two bounds:

    its own limit       one tenant takes at most what its section says, by default half of the
                        deployment's limit
    reserved parts      half of the deployment's limit is divided between the tenants by weight. A
                        tenant within its part is never refused because of other tenants, however
                        many of them flood the gateway.

What is not reserved is for all tenants, in the order in which they ask. The deployment's limit
always holds for all tenants together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, TypeAlias

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.gateway import DEFAULTS, GatewaySection, TenantSection
from prfaas.errors import RequestError
from prfaas.gateway.token_rates import TokenRates

ONE_TENANT = frozenset({""})
RETRY_S = 1.0
_MB = 10**6
_UNSET = TenantSection()
_BARE = re.compile(r"[A-Za-z0-9_-]+")  # a name that TOML does not require to be quoted

LimitKey: TypeAlias = Literal["max_in_flight", "max_queued", "max_queued_tokens", "max_bodies_mb"]


class TenantLimit(NamedTuple):
    """What one tenant may take. `setting` tells where the value comes from."""

    value: int
    setting: str


class Tenants:
    """Who the tenants are, and what each of them has taken."""

    def __init__(
        self,
        section: GatewaySection = DEFAULTS,
        names: Callable[[], Collection[str]] = lambda: ONE_TENANT,
        clock: Clock | None = None,
    ) -> None:
        """`names` returns the tenants that have keys now. A tenant that appears later has the
        values of `gateway.tenant_default`, unless the section names it."""
        self._section = section
        self._names = names
        later_s = section.timeouts.queue_retry_after_s
        self.in_flight = SharedLimit(
            self, "max_in_flight", section.max_in_flight, "sequences in flight", RETRY_S
        )
        self.body_bytes = SharedLimit(
            self,
            "max_bodies_mb",
            int(section.max_bodies_mb * _MB),
            "bytes of the bodies of requests in flight",
            RETRY_S,
        )
        self.queued_tokens = SharedLimit(
            self,
            "max_queued_tokens",
            section.max_queued_tokens,
            "prompt tokens of requests that have no first token yet",
            later_s,
        )
        self.token_rates = TokenRates(self._tokens_per_minute, clock or MonotonicClock())
        self.waiting = SharedLimit(
            self, "max_queued", section.max_queued, "requests that wait for a node", later_s
        )

    @property
    def names(self) -> Collection[str]:
        return self._names()

    @property
    def several(self) -> bool:
        return len(self._names()) > 1

    def weight(self, tenant: str) -> float:
        own, default = self._sections(tenant)
        return own.weight or default.weight or 1.0

    def limit(self, tenant: str, key: LimitKey, total: int) -> TenantLimit | None:
        """The tenant's own limit, of the deployment's `total`. None: only the deployment's limit
        holds."""
        own, default = self._sections(tenant)
        place = f"gateway.tenants.{_toml_key(tenant)}.{key}"
        for section, setting in ((own, place), (default, f"gateway.tenant_default.{key}")):
            value = getattr(section, key, None)
            if value is not None:
                return TenantLimit(int(value * (_MB if key == "max_bodies_mb" else 1)), setting)
        if not self.several:
            return None
        half = f"half of gateway.{key}"
        if key != "max_queued":
            half += f"; set {place} to change it"
        return TenantLimit(max(1, total // 2), half)

    def state(self) -> dict[str, Any]:
        """What each tenant has taken, for operators."""
        limits = (self.in_flight, self.waiting, self.queued_tokens, self.body_bytes)
        return {
            name: {
                "weight": self.weight(name),
                "in_flight": self.in_flight.used(name),
                "queued": self.waiting.used(name),
                "queued_tokens": self.queued_tokens.used(name),
                "body_bytes": self.body_bytes.used(name),
                "refused": sum(limit.refused.get(name, 0) for limit in limits)
                + self.token_rates.refused.get(name, 0),
            }
            for name in sorted(self._names())
        }

    def _tokens_per_minute(self, tenant: str) -> tuple[int, str] | None:
        own, default = self._sections(tenant)
        if own.max_tokens_per_minute is not None:
            place = f"gateway.tenants.{_toml_key(tenant)}.max_tokens_per_minute"
            return own.max_tokens_per_minute, place
        if default.max_tokens_per_minute is not None:
            return default.max_tokens_per_minute, "gateway.tenant_default.max_tokens_per_minute"
        return None

    def _sections(self, tenant: str) -> tuple[TenantSection, TenantSection]:
        return self._section.tenants.get(tenant, _UNSET), self._section.tenant_default


class _Parts(NamedTuple):
    """How a limit is divided between tenants."""

    names: Collection[str]
    limits: dict[str, TenantLimit]  # of tenants that have a limit of their own
    reserved: dict[str, int]
    common: int  # what is not reserved


class SharedLimit:
    """One limit of the gateway, and what each tenant has taken of it."""

    def __init__(
        self, tenants: Tenants, key: LimitKey, total: int, what: str, retry_after_s: float
    ) -> None:
        self.refused: dict[str, int] = {}  # requests, by tenant
        self._tenants = tenants
        self._key = key
        self._total = total
        self._what = what
        self._retry_after_s = retry_after_s
        self._used: dict[str, int] = {}
        self._divided: _Parts | None = None

    def used(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def take(self, tenant: str, amount: int = 1) -> None:
        """Raises `RequestError`, and takes nothing, when the limit refuses it. The status is 429,
        but 503 for the memory of bodies where there is one tenant."""
        used, parts = self.used(tenant), self._parts()
        limit = parts.limits.get(tenant)
        if limit is not None and used + amount > limit.value:
            message = (
                f"{used + amount} {self._what} of tenant {tenant!r} would exceed its limit of "
                f"{limit.value} ({limit.setting})"
            )
            raise self._refuse(tenant, "tenant_limit", message)
        taken = sum(self._used.values()) + amount
        if taken > self._total:
            message = f"{taken} {self._what} would exceed {self._shown_total}"
            raise self._refuse(tenant, "overloaded", message)
        if used + amount > parts.reserved.get(tenant, 0):
            wanted = {**self._used, tenant: used + amount}
            beyond = sum(max(0, n - parts.reserved.get(name, 0)) for name, n in wanted.items())
            if beyond > parts.common:
                raise self._refuse(
                    tenant,
                    "overloaded",
                    f"{used + amount} {self._what} of tenant {tenant!r} would exceed what "
                    f"{self._shown_total} leaves beside the parts reserved for other tenants",
                )
        self._used[tenant] = used + amount

    def release(self, tenant: str, amount: int = 1) -> None:
        left = self._used[tenant] - amount
        if left:
            self._used[tenant] = left
        else:
            del self._used[tenant]

    def most(self, tenant: str) -> TenantLimit:
        """The most that the tenant can have when no other tenant has anything."""
        parts = self._parts()
        left = parts.reserved.get(tenant, 0) + parts.common
        shared = TenantLimit(left, f"what {self._shown_total} leaves beside other tenants")
        return min(parts.limits.get(tenant, shared), shared)

    def _parts(self) -> _Parts:
        """How the limit is divided between the tenants that have keys now."""
        names = self._tenants.names
        if self._divided is None or self._divided.names is not names:
            self._divided = self._divide(names)
        return self._divided

    def _divide(self, names: Collection[str]) -> _Parts:
        found = {name: self._tenants.limit(name, self._key, self._total) for name in names}
        limits = {name: limit for name, limit in found.items() if limit is not None}
        share = 1.0 if len(names) == 1 else 0.5
        weights = {name: self._tenants.weight(name) for name in names}
        unit = share * self._total / sum(weights.values())
        reserved = {name: int(unit * weight) for name, weight in weights.items()}
        for name, limit in limits.items():
            reserved[name] = min(reserved[name], limit.value)
        return _Parts(names, limits, reserved, self._total - sum(reserved.values()))

    @property
    def _shown_total(self) -> str:
        total = f"{self._total / _MB:g}" if self._key == "max_bodies_mb" else str(self._total)
        return f"gateway.{self._key} = {total}"

    def _refuse(self, tenant: str, code: str, message: str) -> RequestError:
        self.refused[tenant] = self.refused.get(tenant, 0) + 1
        full = self._key == "max_bodies_mb" and code == "overloaded"
        status = 503 if full and not self._tenants.several else 429
        return RequestError(status, code, message, retry_after_s=self._retry_after_s)


def _toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else f'"{name}"'
