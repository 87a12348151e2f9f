"""Sockets that services listen on, for IPv4 and IPv6, the addresses that peers use for them, and
how services log requests that are malformed."""

from __future__ import annotations

import ipaddress
import logging
import socket

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from prfaas.config.address import Address
from prfaas.errors import InputError

BACKLOG = 1024
# aiohttp raises these when a client leaves, or sends what is not HTTP or cannot be decompressed.
CLIENT_ERRORS = (web.RequestPayloadError, HttpProcessingError, ClientError, ConnectionError)
_SHOWN_CHARS = 100


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


class _MalformedRequests(logging.Filter):
    """One line for a request that is malformed, or whose client has left. aiohttp logs these as
    errors of the server, with a traceback, so that a client could fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, CLIENT_ERRORS):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            reason = " ".join(str(error).split())
            shown = reason if len(reason) <= _SHOWN_CHARS else f"{reason[:_SHOWN_CHARS]}..."
            record.msg, record.args = "%s: %s", (record.getMessage(), ascii(shown))
            record.exc_info = record.exc_text = None
        return True


_MALFORMED = _MalformedRequests()


def log_malformed_requests_briefly() -> None:
    """Makes every HTTP server of this process log a malformed request in one line."""
    logging.getLogger("aiohttp.server").addFilter(_MALFORMED)  # a filter is added once
