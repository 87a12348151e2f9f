"""Addresses of the form `HOST:PORT`, and URLs of peers: `http://HOST:PORT` or `https://HOST:PORT`.

A process appends the paths that it asks for. A URL of a peer with a path, a query, a fragment or
user info of its own could make it ask for something else, or show its key to another server.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from prfaas.errors import InputError

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_LONGEST_URL = 300  # characters; a host name has at most 253
_LONGEST_HOST = 253
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.ASCII)
_FIX = "write http://HOST:PORT, without a path"


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_network(text: str, where: str) -> Network:
    """Parses an address, or a network such as 10.0.0.0/16."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise InputError(
            f"{text!r} is not an address or a network",
            where=where,
            fix="write an entry like 10.0.0.7 or 10.0.0.0/16, without bits beyond the network's",
        ) from None


def parse_address(text: str, where: str, *, any_port: bool = False) -> Address:
    """Parses `HOST:PORT` or `[IPV6]:PORT`. Port 0 (the system chooses one) needs `any_port`."""
    host, colon, port_text = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed):
        raise InputError(
            f"{text!r} is not an address",
            where=where,
            fix="write HOST:PORT, an IPv6 address in brackets: [::1]:7000",
        )
    lowest = 0 if any_port else 1
    # isascii: str.isdigit also accepts digits that int() or a socket would not. Python refuses to
    # convert thousands of digits.
    digits = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not digits or not lowest <= int(port_text) <= 65535:
        raise InputError(f"{port_text!r} is not a port", where=where, fix=f"give {lowest} to 65535")
    return Address(host, int(port_text))


def parse_peer_url(text: str, where: str) -> str:
    """Returns the URL in its one form: lower case, the host name as IDNA encodes it, without a
    final slash. Raises `InputError` when it is not the URL of a peer."""
    if len(text) > _LONGEST_URL:
        raise InputError(f"has more than {_LONGEST_URL} characters", where=where, fix=_FIX)
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
