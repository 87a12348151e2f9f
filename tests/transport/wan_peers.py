"""Ends of a relayed connection for tests: plain sockets, a timeout on each."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prfaas.clock import Clock
from prfaas.config.address import Address
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.waiting import PATIENCE_S

TIMEOUT_S = PATIENCE_S


@dataclass
class Wan:
    relay: Relay
    listener: socket.socket

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """A new connection's ends: the client's and the target's."""
        client = socket.create_connection(self.relay.address, TIMEOUT_S)
        target, _ = self.listener.accept()
        target.settimeout(TIMEOUT_S)
        return client, target


@contextmanager
def wan(conditions: Conditions | None = None, clock: Clock | None = None) -> Iterator[Wan]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        target = Address(*listener.getsockname())
        here = Address("127.0.0.1", 0)
        with Relay(here, target, conditions or Conditions(), clock=clock) as relay:
            yield Wan(relay, listener)


def receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := sock.recv(1 << 20)):
        data += part
    return bytes(data)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def turned_away(address: Address) -> bool:
    """Connects and is reset: at once, or when it listens for an answer."""
    try:
        with socket.create_connection(address, TIMEOUT_S) as client:
            return was_reset(client)
    except ConnectionResetError:
        return True


def was_reset(sock: socket.socket) -> bool:
    try:
        sock.recv(1)
    except ConnectionResetError:
        return True
    return False
