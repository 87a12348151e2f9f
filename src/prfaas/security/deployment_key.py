"""The key that the kvds of a deployment and its gateways share: whoever has it may take grants,
move prefixes and set roles. An HTTP bearer token, compared in constant time; engines need none,
their socket is their user's."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas.config.strict import read_text
from prfaas.errors import InputError

SHORTEST = 16  # characters: less can be guessed
OPEN_PATHS = frozenset({"/health", "/metrics"})  # for probes: no hashes, nothing to change


def read_deployment_key(file: Path) -> str:
    key = read_text(file).strip()
    if len(key) < SHORTEST or not (key.isascii() and key.isprintable()) or " " in key:
        raise InputError(
            "is no key", file=file, fix=f"one line, {SHORTEST} or more ASCII characters, no spaces"
        )
    return key


def bearer(key: str | None) -> dict[str, str]:
    """Headers for requests to a kvd."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def require_key(key: str, refusal: Callable[[], web.Response]) -> Middleware:
    expected = bearer(key)["Authorization"].encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path in OPEN_PATHS or hmac.compare_digest(shown, expected):
            return await handler(request)
        return refusal()

    return check
