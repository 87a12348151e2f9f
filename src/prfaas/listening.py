"""Sockets that services listen on, for IPv4 and IPv6, and the addresses that peers use for them."""

from __future__ import annotations

import ipaddress
import socket

from prfaas.config.address import Address
from prfaas.errors import InputError

BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InputError(
            f"cannot listen: {error.strerror or error}",
            where=str(Address(host, port)),
            fix="choose another address or port",
        ) from None


def reachable(address: Address, advertise: str | None = None) -> Address:
    """The address for peers: a wildcard can be listened on, but not connected to."""
    if advertise is not None:
        return Address(advertise, address.port)
    try:
        anywhere = ipaddress.ip_address(address.host).is_unspecified
    except ValueError:
        anywhere = False
    return Address(socket.gethostname(), address.port) if anywhere else address


def service_url(listening: socket.socket, *, tls: bool) -> str:
    """The URL of a service on this socket."""
    address = reachable(Address(*listening.getsockname()[:2]))
    return f"{'https' if tls else 'http'}://{address}"
