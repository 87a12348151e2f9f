"""The line of JSON with which a process announces on stdout that it is ready.

    {"ready":"kvd","node":"a","socket":"/run/a.sock","data":"127.0.0.1:7400","http":"http://..."}

The process that starts another one reads lines until it finds this one. It is the only line of JSON
with the key `ready`; a process may print other lines before and after it.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec


class KvdReady(msgspec.Struct, frozen=True, tag_field="ready", tag="kvd"):
    """A kvd that accepts engines, transfers and HTTP requests."""

    node: str
    socket: str
    data: str  # HOST:PORT for transfers
    http: str  # URL of the HTTP API


class NodeReady(msgspec.Struct, frozen=True, tag_field="ready", tag="node"):
    """A node that accepts requests."""

    model: str
    http: str  # URL


class GatewayReady(msgspec.Struct, frozen=True, tag_field="ready", tag="gateway"):
    """A gateway that accepts requests."""

    model: str
    http: str  # URL


class RelayedAddress(msgspec.Struct, frozen=True):
    """One address of a relay and the address that it leads to, both HOST:PORT."""

    listen: str
    to: str


class RelayReady(msgspec.Struct, frozen=True, tag_field="ready", tag="wan"):
    """A WAN relay that accepts connections."""

    addresses: list[RelayedAddress]  # in the order of the flags
    conditions: str  # for people


Ready: TypeAlias = KvdReady | NodeReady | GatewayReady | RelayReady
R = TypeVar("R", bound=Ready)


def readiness_line(message: Ready) -> str:
    """The announcement, without the end of the line."""
    return msgspec.json.encode(message).decode()


def parse_readiness(line: str, kind: type[R]) -> R | None:
    """The announcement of that kind of process, or None for every other line."""
    if not line.startswith('{"ready":'):
        return None
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError:
        return None
