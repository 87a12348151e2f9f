"""Who may use the console: sessions of the operator, and only pages that this gateway has sent.

Without an operator key and without tenant keys there is no login, as for `/prfaas/v1/state`. A
browser then does not protect the gateway from other sites by itself: a site may resolve its own
name to the gateway's address. So requests have to name the gateway by its address, by `localhost`
or by its configured host.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from prfaas.clock import Clock
from prfaas.console.page import STYLE
from prfaas.errors import RequestError
from prfaas.gateway.api.credentials import GatewayCredentials
from prfaas.gateway.console.sessions import LIFETIME_S, Sessions
from prfaas.security.own_host import (
    CROSS_SITE,
    SAFE_METHODS,
    UNKNOWN_HOST,
    host_name,
    is_address,
    is_own_origin,
)

_LOG = logging.getLogger(__name__)
PAGE = "/"
PREFIX = "/console/"
LOGIN = f"{PREFIX}login"
ASSETS = f"{PREFIX}assets/"
_STYLE_PATH = f"{ASSETS}{STYLE}"  # of the login page
_LONGEST_TOKEN = 128


class ConsoleAccess:
    def __init__(
        self, credentials: GatewayCredentials, clock: Clock, host: str, port: int, *, tls: bool
    ) -> None:
        """`host` and `port`: where the gateway listens."""
        self.credentials = credentials
        self.sessions = Sessions(credentials.operator)
        self._clock = clock
        self._host = host.lower()
        self._tls = tls
        # Browsers send cookies to all ports of a host.
        name = f"prfaas_console_{port}"
        # Browsers accept this prefix from the host itself and over TLS only.
        self._cookie = f"__Host-{name}" if tls else name

    @property
    def has_login(self) -> bool:
        return self.credentials.operator is not None

    def describe(self) -> dict[str, Any]:
        """What the page is told of it: the tenants that the prompt box offers, and whether there is
        a session."""
        names = sorted(self.credentials.tenants) if self.credentials.locked else []
        return {"tenants": names, "login": self.has_login}

    def admit(self, request: web.Request) -> None:
        """Raises `RequestError` when the request may not use its path."""
        if not self.has_login:
            if self.credentials.locked:
                raise RequestError(
                    403,
                    "operator_key_required",
                    "the console is closed, because the gateway has no operator key; set "
                    "gateway.operator_key_file",
                )
            self._check_host(request)
        path = request.path
        if not (request.method in SAFE_METHODS and (path == PAGE or path.startswith(ASSETS))):
            _check_origin(request)
        if path not in (PAGE, LOGIN, _STYLE_PATH) and not self.is_logged_in(request):
            raise RequestError(
                401, "unauthorized", "the console has no session; log in with the operator key"
            )

    def is_logged_in(self, request: web.Request) -> bool:
        return not self.has_login or self.sessions.is_open(self.token(request), self._clock.now())

    def token(self, request: web.Request) -> str:
        found = request.cookies.get(self._cookie, "")
        return found if len(found) <= _LONGEST_TOKEN else ""

    def log_in(self, request: web.Request, key: str) -> str | None:
        """The token of a new session; None: the key is wrong. Raises `TooManyFailures`."""
        address = request.remote or ""
        token = self.sessions.log_in(key, address, self._clock.now())
        if token is None:
            _LOG.warning("a login to the console from %s failed: wrong key", address)
        return token

    def set_cookie(self, response: web.Response, token: str) -> None:
        response.set_cookie(
            self._cookie,
            token,
            max_age=int(LIFETIME_S),
            path="/",
            secure=self._tls,
            httponly=True,
            samesite="Strict",
        )

    def remove_cookie(self, response: web.Response) -> None:
        response.del_cookie(
            self._cookie, path="/", secure=self._tls, httponly=True, samesite="Strict"
        )

    def _check_host(self, request: web.Request) -> None:
        name = host_name(f"//{request.headers.get('Host', '')}")
        if name is None or not (name == "localhost" or name == self._host or is_address(name)):
            raise RequestError(
                403,
                UNKNOWN_HOST,
                "the console without a login is only served under the gateway's address; use that, "
                "or set gateway.operator_key_file",
            )


def _check_origin(request: web.Request) -> None:
    """Raises `RequestError` for a request that a page of another origin has made. Browsers name the
    origin of every request that is not a GET."""
    headers = request.headers
    told = request.method in SAFE_METHODS or "Sec-Fetch-Site" in headers or "Origin" in headers
    if not told or not is_own_origin(request.method, headers):
        raise RequestError(403, CROSS_SITE, "the console accepts requests of its own pages only")
