"""Moves the bytes of all relayed connections: reads when a lane accepts a chunk, and writes when
the chunk's time has come.

The relay's loop calls it, on one thread. It owns the connections, their flows and the selectors of
their sockets. It does not accept connections (`wan.acceptor` does) and does not wait for events.
"""

from __future__ import annotations

import heapq
import itertools
import math
import selectors
import socket

from prfaas.clock import Clock
from prfaas.wan.flow import End, RelayedConnection, RelayFlow, close
from prfaas.wan.path import EmulatedPath
from prfaas.wan.stats import LatenessCounter

# `damage` is meant for bytes that checksums cover: the middle of a chunk of this size is payload.
_MIN_DAMAGED_BYTES = 4096


class Forwarder:
    def __init__(self, selector: selectors.BaseSelector, path: EmulatedPath, clock: Clock) -> None:
        self.connections: set[RelayedConnection] = set()
        self.forwarded_bytes = [0, 0]  # per direction
        self.held_bytes = 0
        self.held_peak_bytes = 0
        self.chunks_to_damage = 0
        self.damaged_chunks = 0
        self.forward_lateness = LatenessCounter()
        self._selector = selector
        self._path = path
        self._path_clock = path.clock
        self._lanes = path.lanes
        self._clock = clock
        self._order = itertools.count(1)
        # One selector per direction, nested in the main one while its lane accepts chunks: a full
        # lane then costs one system call, not one per connection.
        self._sources = (selectors.DefaultSelector(), selectors.DefaultSelector())
        self._watching = [False, False]
        self._due: tuple[list[tuple[float, int, RelayFlow]], ...] = ([], [])

    # Connections -----------------------------------------------------------------------------

    def start(self, connection: RelayedConnection) -> None:
        """Both sockets of the connection are connected: begins to read from them."""
        for flow in connection.flows:
            self._set_reading(flow, True)

    def drop(self, connection: RelayedConnection, *, reset: bool) -> None:
        connection.open = False
        self.connections.discard(connection)
        for flow in connection.flows:
            self._set_reading(flow, False)
            self.held_bytes -= flow.held_bytes
            flow.drop()
        for sock in (connection.client, connection.server):
            if sock.fileno() in self._selector.get_map():
                self._selector.unregister(sock)
            close(sock, reset=reset)

    def drop_all(self) -> None:
        """Resets every connection. The bytes on the path are lost."""
        for connection in list(self.connections):
            self.drop(connection, reset=True)

    def apply_limits(self) -> None:
        """The path's conditions have changed: each flow may hold more bytes, or fewer."""
        for connection in self.connections:
            if connection.connecting_until_s is None:
                for flow in connection.flows:
                    self._limit_reading(flow)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    # Called in every round of the loop -------------------------------------------------------

    def read_sources(self, direction: int, path_s: float) -> None:
        """Reads until the lane is booked. The flow that was read least recently comes first, so
        that each connection gets its share of the lane, however much the others offer."""
        lane = self._lanes[direction]
        if lane.wait_s(path_s) > 0 or not self._sources[direction].get_map():
            return
        flows: list[RelayFlow] = [key.data for key, _ in self._sources[direction].select(0)]
        for flow in sorted(flows, key=lambda flow: flow.last_read):
            if lane.wait_s(path_s) > 0:
                return
            if flow.reading:
                self._read(flow, path_s)

    def write_due(self, direction: int, path_s: float) -> None:
        due = self._due[direction]
        while due and due[0][0] <= path_s:
            leaves_at_s, _, flow = heapq.heappop(due)
            flow.in_heap = False
            if flow.connection.open:
                if not flow.delayed_by_target:
                    late_s = self._path_clock.read(self._clock.now()) - leaves_at_s
                    self.forward_lateness.add(late_s)
                self._write(flow, path_s)

    def watch_sources(self, direction: int, watching: bool) -> None:
        if watching != self._watching[direction]:
            self._watching[direction] = watching
            source = self._sources[direction]
            if watching:
                self._selector.register(source.fileno(), selectors.EVENT_READ, _do_nothing)
            else:
                self._selector.unregister(source.fileno())

    def until_due_s(self, path_s: float) -> float:
        """The time until a write is due or a lane accepts a chunk; inf when neither is expected."""
        wait_s = math.inf
        for direction in (0, 1):
            if self._due[direction]:
                wait_s = min(wait_s, self._due[direction][0][0] - path_s)
            if not self._watching[direction] and self.connections:
                wait_s = min(wait_s, self._lanes[direction].wait_s(path_s))
        return wait_s

    # One flow --------------------------------------------------------------------------------

    def _read(self, flow: RelayFlow, path_s: float) -> None:
        flow.last_read = next(self._order)
        try:
            data = flow.source.recv(self._path.conditions.chunk_bytes)
        except BlockingIOError:
            return
        except OSError:
            self._handle_reset(flow.source, flow.connection, path_s)
            return
        leaves_at_s = self._lanes[flow.direction].admit(len(data), path_s)
        if data:
            if self.chunks_to_damage and flow.direction == 0 and len(data) >= _MIN_DAMAGED_BYTES:
                data = self._damage(data)
            flow.put(memoryview(data), leaves_at_s)
            self.held_bytes += len(data)
            self.held_peak_bytes = max(self.held_peak_bytes, self.held_bytes)
        else:
            flow.put(End.CLOSED, leaves_at_s)
        self._limit_reading(flow)
        self._queue(flow)

    def _damage(self, data: bytes) -> bytes:
        self.chunks_to_damage -= 1
        self.damaged_chunks += 1
        changed = bytearray(data)
        changed[len(data) // 2] ^= 0x10
        return bytes(changed)

    def _write(self, flow: RelayFlow, path_s: float) -> None:
        before_bytes = flow.held_bytes
        try:
            end = flow.send_due(path_s)
            if end is End.CLOSED:
                flow.target.shutdown(socket.SHUT_WR)
        except OSError:
            self._count_sent(flow, before_bytes)
            self._handle_reset(flow.target, flow.connection, path_s)
            return
        self._count_sent(flow, before_bytes)
        if end is End.RESET:
            self.drop(flow.connection, reset=True)
        elif all(other.finished for other in flow.connection.flows):
            self.drop(flow.connection, reset=False)
        elif flow.blocked:
            self._selector.register(flow.target, selectors.EVENT_WRITE, lambda: self._unblock(flow))
        else:
            self._queue(flow)
        if flow.connection.open:
            self._limit_reading(flow)

    def _count_sent(self, flow: RelayFlow, before_bytes: int) -> None:
        sent_bytes = before_bytes - flow.held_bytes
        self.forwarded_bytes[flow.direction] += sent_bytes
        self.held_bytes -= sent_bytes

    def _unblock(self, flow: RelayFlow) -> None:
        # Queue the flow again and do not write at once: a stalled path must not write.
        self._selector.unregister(flow.target)
        flow.blocked = False
        self._queue(flow)

    def _queue(self, flow: RelayFlow) -> None:
        if flow.queue and not flow.in_heap and not flow.blocked:
            flow.in_heap = True
            entry = (flow.queue[0].leaves_at_s, next(self._order), flow)
            heapq.heappush(self._due[flow.direction], entry)

    def _limit_reading(self, flow: RelayFlow) -> None:
        """Stops reading a flow that holds its share of bytes, until half of them have left."""
        limit_bytes = self._path.conditions.held_bytes
        wanted = flow.held_bytes < (limit_bytes if flow.reading else limit_bytes / 2)
        self._set_reading(flow, wanted and not flow.ended)

    def _set_reading(self, flow: RelayFlow, reading: bool) -> None:
        if reading != flow.reading:
            flow.reading = reading
            if reading:
                self._sources[flow.direction].register(flow.source, selectors.EVENT_READ, flow)
            else:
                self._sources[flow.direction].unregister(flow.source)

    def _handle_reset(
        self, dead: socket.socket, connection: RelayedConnection, path_s: float
    ) -> None:
        """One end was reset. The bytes for that end are dropped. The other end receives the reset
        after the bytes that are already on their way to it."""
        for flow in connection.flows:
            self._set_reading(flow, False)
            if flow.target is dead:
                self.held_bytes -= flow.held_bytes
                flow.drop()
                flow.finished = True
            else:
                flow.put(End.RESET, self._lanes[flow.direction].admit(0, path_s))
                self._queue(flow)


def _do_nothing() -> None:
    """The next round of the loop reads the sources."""
