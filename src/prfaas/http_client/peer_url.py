"""The form of a peer's URL: `http://HOST:PORT` or `https://HOST:PORT`, and nothing else.

A process appends the paths that it asks for. A URL with a path, a query, a fragment or user info of
its own could make it ask for something else, or show its key to another server.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from prfaas.errors import InputError

LONGEST = 300  # characters; a host name has at most 253
_LONGEST_HOST = 253
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.ASCII)
_FIX = "write http://HOST:PORT, without a path"


def parse_peer_url(text: str, where: str) -> str:
    """Returns the URL in its one form: lower case, the host name as IDNA encodes it, without a
    final slash. Raises `InputError` when it is not the URL of a peer."""
    if len(text) > LONGEST:
        raise InputError(f"has more than {LONGEST} characters", where=where, fix=_FIX)
    if " " in text or not text.isprintable():
        raise InputError(f"{text!r} has characters that a URL cannot have", where=where, fix=_FIX)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{text!r} is not a URL: {error}", where=where, fix=_FIX) from None
    if "@" in parts.netloc:  # not shown: it may be a password
        raise InputError("the URL has user info", where=where, fix=_FIX)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{text!r} is not the URL of a peer", where=where, fix=_FIX)
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise InputError(f"{text!r} has a path, a query or a fragment", where=where, fix=_FIX)
    if not port:
        raise InputError(f"{text!r} has no port", where=where, fix=_FIX)
    return f"{parts.scheme}://{_host(parts.hostname, where)}:{port}"


def _host(name: str, where: str) -> str:
    """The host as a URL has it: an IPv6 address in brackets, other names as IDNA encodes them."""
    if "%" in name:  # an interface name, which another host does not know
        raise InputError(f"{name!r} has a zone", where=where, fix="give an address without one")
    if ":" in name:
        try:
            return f"[{ipaddress.IPv6Address(name)}]"
        except ValueError as error:
            raise InputError(f"the host is not an address: {error}", where=where) from None
    try:
        ascii_name = name.encode("idna").decode().lower()
    except UnicodeError as error:
        raise InputError(
            f"{name!r} is not a host name: {error}", where=where, fix="labels have 1 to 63 letters"
        ) from None
    if len(ascii_name) > _LONGEST_HOST or not _HOST.fullmatch(ascii_name):
        raise InputError(f"{name!r} is not a host name", where=where, fix=_FIX)
    return ascii_name
