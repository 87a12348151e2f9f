"""How many prompt tokens a minute each tenant may send. Bookkeeping only.

A tenant has an account of tokens, which fills up to one minute's worth. What its requests send is
taken from it, and it may go into debt: a request is refused while the account is in debt, before
its body is read. So a long prompt is served, and the time after it pays for it. A body counts
while it arrives and while it is decompressed, also when it is refused later: reading it costs work,
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from prfaas.clock import Clock
from prfaas.errors import RequestError

BYTES_PER_TOKEN = 8  # of a body: about the JSON of one token id


class TokenRates:
    def __init__(self, limit: Callable[[str], tuple[int, str] | None], clock: Clock) -> None:
        """`limit` returns a tenant's tokens per minute and the setting that has them, or None."""
        self.refused: dict[str, int] = {}  # requests, by tenant
        self._limit = limit
        self._clock = clock
        self._accounts: dict[str, tuple[float, float]] = {}  # by tenant: tokens, and when

    def check(self, tenant: str) -> None:
        """Raises `RequestError` when the tenant is in debt."""
        limit = self._limit(tenant)
        if limit is None:
            return
        tokens, per_s = self._tokens(tenant, limit[0]), limit[0] / 60
        if tokens >= 0:
            return
        self.refused[tenant] = self.refused.get(tenant, 0) + 1
        raise RequestError(
            429,
            "tenant_limit",
            f"tenant {tenant!r} has sent more than its {limit[0]} prompt tokens per minute "
            f"({limit[1]})",
            retry_after_s=math.ceil(-tokens / per_s),
        )

    def charge(self, tenant: str, tokens: float) -> None:
        limit = self._limit(tenant)
        if limit is not None:
            left = self._tokens(tenant, limit[0]) - tokens
            self._accounts[tenant] = (left, self._clock.now())

    def _tokens(self, tenant: str, per_minute: int) -> float:
        now = self._clock.now()
        tokens, since_s = self._accounts.get(tenant, (per_minute, now))
        return min(per_minute, tokens + (now - since_s) * per_minute / 60)
