"""One direction of one relayed connection: a queue of bytes, each with its time of departure.

No event loop here: `transport.wan` decides when to read and when to write.
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
    """How a direction ends; travels the path behind its last byte."""

    CLOSED = "closed"  # the sender has no more to say, the other direction goes on
    RESET = "reset"


class Parcel(NamedTuple):
    leaves_at_s: float  # in path time
    content: memoryview | End


class RelayFlow:
    """`held_bytes` is the sum of the queued parcels. They leave in order: one that is due early
    waits for those before it."""

    __slots__ = (
        "blocked",
        "direction",
        "finished",
        "held_up",
        "held_bytes",
        "in_heap",
        "pair",
        "queue",
        "reading",
        "served",
        "source",
        "target",
    )

    def __init__(
        self, pair: RelayedConnection, direction: int, source: socket.socket, target: socket.socket
    ) -> None:
        self.pair = pair
        self.direction = direction
        self.source = source
        self.target = target
        self.queue: deque[Parcel] = deque()
        self.held_bytes = 0
        self.reading = False  # the source is watched
        self.blocked = False  # the target's kernel buffer is full
        self.held_up = False  # its oldest bytes have waited for the target's kernel buffer
        self.in_heap = False
        self.finished = False  # its end has been handed on
        self.served = 0  # when it was last read, in reads of its direction

    @property
    def ended(self) -> bool:
        return self.finished or (bool(self.queue) and isinstance(self.queue[-1].content, End))

    def put(self, content: memoryview | End, leaves_at_s: float) -> None:
        self.queue.append(Parcel(leaves_at_s, content))
        if isinstance(content, memoryview):
            self.held_bytes += len(content)

    def send_due(self, now_s: float) -> End | None:
        """Sends what is due until the kernel takes no more (`blocked`). Returns the end of this
        direction, when it was reached. OSError: the target is gone."""
        self.held_up = False
        while self.queue and self.queue[0].leaves_at_s <= now_s:
            leaves_at_s, content = self.queue[0]
            if isinstance(content, End):
                self.queue.popleft()
                self.finished = True
                return content
            try:
                sent = self.target.send(content)
            except BlockingIOError:
                self.blocked = self.held_up = True
                break
            self.held_bytes -= sent
            if sent < len(content):
                self.queue[0] = Parcel(leaves_at_s, content[sent:])
                self.blocked = self.held_up = True
                break
            self.queue.popleft()
        return None

    def drop(self) -> None:
        self.queue.clear()
        self.held_bytes = 0


class RelayedConnection:
    """One relayed connection: the client's socket, ours to the target, and the flows between."""

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
            pass  # it is closed already, or its peer was faster
    connection.close()
