"""The relay's listening ports: accepts clients and connects each of them to its target.

The relay's loop calls it, on one thread. A connection whose target answers goes to the forwarder.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from functools import partial

from prfaas.clock import Clock
from prfaas.config.address import Address
from prfaas.errors import InputError
from prfaas.wan.flow import RelayedConnection, close
from prfaas.wan.forwarder import Forwarder

MAX_CONNECTIONS = 256
CONNECT_TIMEOUT_S = 5.0
# A path has one bottleneck queue, the lane's. The kernel's buffers before and after it are kept
# small, or each connection would hide megabytes more there.
_KERNEL_BUFFER_BYTES = 512 * 1024


class RelayPort:
    """One address that the relay listens at, and the target of its connections."""

    def __init__(self, listen: Address, target: Address) -> None:
        self.family, self.target = _resolve(target)
        self._listen_family, where = _resolve(listen)
        # Keeps the port while an outage has closed the listener.
        self._port_holder = _bound(self._listen_family, where, listen)
        self._bound_to = self._port_holder.getsockname()
        self.address = Address(listen.host, self._bound_to[1])
        self.listener: socket.socket | None = None

    def open(self) -> socket.socket:
        listener = _bound(self._listen_family, self._bound_to, self.address)
        # Accepted sockets inherit this. Set it before the handshake, which fixes the window scale.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER_BYTES)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
        self.listener = listener
        return listener

    def close(self) -> None:
        self._port_holder.close()


class Acceptor:
    def __init__(
        self,
        routes: Sequence[tuple[Address, Address]],
        selector: selectors.BaseSelector,
        forwarder: Forwarder,
        clock: Clock,
    ) -> None:
        """Each route is an address to listen at and its target."""
        self.accepted = 0
        self.refused = 0
        self._ports = [RelayPort(*route) for route in routes]
        self.addresses = [port.address for port in self._ports]
        self._selector = selector
        self._forwarder = forwarder
        self._clock = clock

    def open_listeners(self) -> None:
        for port in self._ports:
            if port.listener is None:
                accept = partial(self._accept, port)
                self._selector.register(port.open(), selectors.EVENT_READ, accept)

    def close_listeners(self) -> None:
        for port in self._ports:
            if port.listener is not None:
                self._selector.unregister(port.listener)
                port.listener.close()
                port.listener = None

    def close(self) -> None:
        self.close_listeners()
        for port in self._ports:
            port.close()

    def accept_waiting(self) -> None:
        """Accepts every connection whose handshake the kernel has completed: an outage keeps
        connections, but closing a listener resets those that still wait in its queue. The kernel
        resets a client whose handshake completes between this and the closing; no listener can
        prevent that."""
        for port in self._ports:
            while port.listener is not None and self._accept(port):
                pass

    def refuse_overdue(self, now_s: float) -> None:
        """Resets the clients whose target has not answered in time."""
        connecting = [c for c in self._forwarder.connections if c.connecting_until_s is not None]
        for connection in connecting:
            assert connection.connecting_until_s is not None
            if now_s >= connection.connecting_until_s:
                self._refuse(connection)

    def _accept(self, port: RelayPort) -> bool:
        """Accepts one connection; returns False when none waits."""
        assert port.listener is not None
        try:
            client, _ = port.listener.accept()
        except OSError:
            return False  # the client disconnected first
        self.accepted += 1
        if len(self._forwarder.connections) >= MAX_CONNECTIONS:
            self.refused += 1
            close(client, reset=True)
            return True
        try:
            server = socket.socket(port.family, socket.SOCK_STREAM)
        except OSError:  # out of descriptors
            self.refused += 1
            close(client, reset=True)
            return True
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER_BYTES)
        connection = RelayedConnection(client, server, self._clock.now() + CONNECT_TIMEOUT_S)
        self._forwarder.connections.add(connection)
        server.connect_ex(port.target)
        self._selector.register(
            server, selectors.EVENT_WRITE, lambda: self._finish_connecting(connection)
        )
        return True

    def _finish_connecting(self, connection: RelayedConnection) -> None:
        if connection.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._refuse(connection)
            return
        self._selector.unregister(connection.server)
        connection.connecting_until_s = None
        self._forwarder.start(connection)

    def _refuse(self, connection: RelayedConnection) -> None:
        self.refused += 1
        self._forwarder.drop(connection, reset=True)


def _resolve(address: Address) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        family, _, _, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise InputError(f"{address.host}: {error.strerror}", fix="check the host name") from None
    except ValueError as error:  # UnicodeError for a label that is too long, and zero bytes
        raise InputError(f"{address.host!r} is not a host: {error}") from None
    return family, (str(found[0]), int(found[1]))


def _bound(family: socket.AddressFamily, where: tuple[str, int], named: Address) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(where)
    except OSError as error:
        sock.close()
        raise InputError(f"cannot listen on {named}: {error.strerror}") from None
    return sock
