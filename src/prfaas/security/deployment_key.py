"""The deployment key, which the kvds and gateways of a deployment share. A caller with this key may
take grants, move prefixes and set roles.

It is an HTTP bearer token and is compared in constant time. Engines do not need it: their socket
belongs to their user.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas.security.secret_file import read_secret

MIN_CHARACTERS = 16  # a shorter key can be guessed
OPEN_PATHS = frozenset({"/health", "/metrics"})  # for probes; they reveal no hashes, change nothing


def read_deployment_key(file: Path) -> str:
    return read_secret(file, min_characters=MIN_CHARACTERS)


def bearer(key: str | None) -> dict[str, str]:
    """The headers of a request to a kvd."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def require_key(key: str, refuse: Callable[[], web.Response]) -> Middleware:
    """A middleware that returns `refuse()` for a request without the key."""
    expected = bearer(key)["Authorization"].encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path in OPEN_PATHS or hmac.compare_digest(given, expected):
            return await handler(request)
        return refuse()

    return check
