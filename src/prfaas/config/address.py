"""Addresses of the form `HOST:PORT`."""

from __future__ import annotations

from typing import NamedTuple

from prfaas.errors import InputError


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
