"""One direction of one relayed connection: a queue of bytes, each with the time at which it leaves.

There is no event loop here: `wan.forwarder` decides when to read and when to write.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections import deque
from typing import NamedTuple

# Closing with a linger of zero sends a reset.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class End(enum.Enum):
    """How a direction ends. The end travels the path after the last byte."""

    CLOSED = "closed"  # the sender has no more bytes; the other direction continues
    RESET = "reset"


class Parcel(NamedTuple):
    leaves_at_s: float  # in path time
    content: memoryview | End


class RelayFlow:
    """`held_bytes` is the sum of the queued parcels. Parcels leave in order: a parcel that is due
    early waits for those before it."""

    __slots__ = (
        "blocked",
        "connection",
        "delayed_by_target",
        "direction",
        "finished",
        "held_bytes",
        "in_heap",
        "last_read",
        "queue",
        "reading",
        "source",
        "target",
    )

    def __init__(
        self,
        connection: RelayedConnection,
        direction: int,
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        self.connection = connection
        self.direction = direction
        self.source = source
        self.target = target
        self.queue: deque[Parcel] = deque()
        self.held_bytes = 0
        self.reading = False  # the source is registered for reading
        self.blocked = False  # the target's kernel buffer is full
        self.delayed_by_target = False  # the oldest bytes have waited for the target's buffer
        self.in_heap = False
        self.finished = False  # the end of this direction has been forwarded
        self.last_read = 0  # sequence number of the latest read from the source

    @property
    def ended(self) -> bool:
        return self.finished or (bool(self.queue) and isinstance(self.queue[-1].content, End))

    def put(self, content: memoryview | End, leaves_at_s: float) -> None:
        self.queue.append(Parcel(leaves_at_s, content))
        if isinstance(content, memoryview):
            self.held_bytes += len(content)

    def send_due(self, now_s: float) -> End | None:
        """Sends the due parcels until the kernel buffer is full (`blocked`). Returns the end of
        this direction if it was reached. Raises OSError when the target is gone."""
        self.delayed_by_target = False
        while self.queue and self.queue[0].leaves_at_s <= now_s:
            leaves_at_s, content = self.queue[0]
            if isinstance(content, End):
                self.queue.popleft()
                self.finished = True
                return content
            try:
                sent = self.target.send(content)
            except BlockingIOError:
                self.blocked = self.delayed_by_target = True
                break
            self.held_bytes -= sent
            if sent < len(content):
                self.queue[0] = Parcel(leaves_at_s, content[sent:])
                self.blocked = self.delayed_by_target = True
                break
            self.queue.popleft()
        return None

    def drop(self) -> None:
        self.queue.clear()
        self.held_bytes = 0


class RelayedConnection:
    """The client's socket, the relay's socket to the target, and the flows between them."""

    __slots__ = ("client", "connecting_until_s", "flows", "open", "server")

    def __init__(
        self, client: socket.socket, server: socket.socket, connecting_until_s: float
    ) -> None:
        self.client = client
        self.server = server
        self.connecting_until_s: float | None = connecting_until_s
        self.flows = (RelayFlow(self, 0, client, server), RelayFlow(self, 1, server, client))
        self.open = True


def close(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        except OSError:
            pass  # the socket is closed already, or the peer has reset it
    connection.close()
