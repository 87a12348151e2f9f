"""What a service without keys answers: requests of programs of its own host. Pure, but for the
middleware.

A browser of that host is such a program, and the pages that it shows are anybody's. A page may send
a request to the service without asking (a POST with a form's content type), and a site may resolve
its own name to this host's address, after which its pages are the service's own to the browser.
Names tell the latter, and the headers that browsers send tell the former.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas.security.exposure import is_loopback

UNKNOWN_HOST, CROSS_SITE = "unknown_host", "cross_site"
SAFE_METHODS = ("GET", "HEAD")
# Pages send these anywhere, and a body without a type, too.
_FORMS = frozenset({"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
_FIX = "give it a key, or accept the risk with --insecure"
Headers: TypeAlias = Mapping[str, str]


class Refusal(NamedTuple):
    """Of a request, with status 403."""

    code: str
    message: str


class OwnHost(NamedTuple):
    """A service without keys that listens on loopback, under this name or address."""

    host: str
    advertised: str = ""  # another name that its operator has given it, of a tunnel for example

    @classmethod
    def of(cls, host: str, *, insecure: bool, advertised: str | None = None) -> OwnHost | None:
        """None where other hosts may reach the service, or its operator has accepted the risk: its
        names are not known then."""
        return cls(host, advertised or "") if is_loopback(host) and not insecure else None

    def refusal(self, method: str, headers: Headers) -> Refusal | None:
        """Why a request must not be answered; None: it may be."""
        given = headers.get("Host")  # every browser sends it
        name = None if given is None else host_name(f"//{given}")
        if given is not None and not (name and self._is_own(name)):
            return Refusal(
                UNKNOWN_HOST,
                "this service has no key, and answers only requests to localhost or a loopback "
                f"address, or to the name that it advertises; {_FIX}",
            )
        if not is_own_origin(method, headers) or (
            method not in SAFE_METHODS and _is_browser(headers) and _is_form(headers)
        ):
            return Refusal(
                CROSS_SITE,
                "this service has no key, and answers no requests of pages of other sites, nor "
                f"forms of browsers; {_FIX}",
            )
        return None

    def _is_own(self, name: str) -> bool:
        bare = name.removesuffix(".")  # with the dot, the name is looked up as it is
        own = {one.lower().removesuffix(".") for one in (self.host, self.advertised) if one}
        return is_loopback(bare) or bare in own


def refuse_foreign(
    own: OwnHost, refuse: Callable[[Refusal], web.StreamResponse], open_paths: frozenset[str]
) -> Middleware:
    """A middleware that returns `refuse(...)` for a request that `own` refuses."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = None
        if request.path not in open_paths:
            refusal = own.refusal(request.method, request.headers)
        return await handler(request) if refusal is None else refuse(refusal)

    return check


def is_own_origin(method: str, headers: Headers) -> bool:
    """Whether no page of another origin has made the request. Browsers say so in `Sec-Fetch-Site`,
    or where they do not send that, in `Origin`. Other programs send neither."""
    site = headers.get("Sec-Fetch-Site")
    if site is not None:  # `none`: an address that a person has entered
        return site == "same-origin" or (site == "none" and method in SAFE_METHODS)
    origin = headers.get("Origin")
    return origin is None or _netloc(origin) == headers.get("Host", "").lower()


def host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_browser(headers: Headers) -> bool:
    return (
        "Origin" in headers
        or "Sec-Fetch-Site" in headers
        or headers.get("User-Agent", "").startswith("Mozilla/")
    )


def _is_form(headers: Headers) -> bool:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower() in _FORMS


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc.lower() or None
    except ValueError:
        return None
