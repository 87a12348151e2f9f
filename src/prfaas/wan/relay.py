"""A user-space relay that imposes a WAN on TCP connections: rate, delay, jitter, stalls, outages,
cut connections, damaged bytes. No root needed.

    client ── kernel ──► Lane 0 ──► delay ──► kernel ── target
           ◄── kernel ── delay ◄── Lane 1 ◄── kernel ──

One thread and one loop move all bytes: read when the lane takes a chunk, write when its time has
come. A full lane or a full connection is simply not read, so its sender waits. What the relay
cannot show is packet loss: each hop of it is a loss-free TCP of its own (`testing.lossy_net` has
real packets).
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address
from prfaas.errors import InputError
from prfaas.wan.flow import End, RelayedConnection, RelayFlow, close
from prfaas.wan.path import Conditions, Lane, PathClock, PathState
from prfaas.wan.stats import LatenessCounter, RelayStats

MAX_CONNECTIONS = 256
CONNECT_TIMEOUT_S = 5.0
# Bounds every wait, so that nothing depends on a wake-up that did not come.
_LONGEST_WAIT_S = 1.0
_CONTROL_TIMEOUT_S = 10.0
# A path has one bottleneck queue, the lane's. The kernel's buffers before and after it are kept
# small, or each connection would hide megabytes more there.
_KERNEL_BUFFER_BYTES = 512 * 1024
# Damage is for what checksums guard: chunks of at least this size are payload in their middle.
_DAMAGED_BYTES = 4096


class _Door:
    """One address that the relay listens at, and where its connections lead."""

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
        # Inherited by accepted sockets; must precede the handshake, which fixes the window scale.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER_BYTES)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
        self.listener = listener
        return listener

    def close(self) -> None:
        self._port_holder.close()


class Relay:
    """Listens as soon as it is built; moves bytes while `run` runs, or between `start` and
    `close`. `change`, `stall`, `outage`, `restore`, `cut` and `damage` may be called from any
    thread and return once they are in force. Pairs of addresses beyond the first (`also`) share its
    rate: one path, several hosts."""

    def __init__(
        self,
        listen: Address,
        target: Address,
        conditions: Conditions,
        *,
        also: Sequence[tuple[Address, Address]] = (),
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._doors = [_Door(*pair) for pair in ((listen, target), *also)]
        self.address = self._doors[0].address
        self._conditions = conditions
        self._lanes = (Lane(conditions, seed), Lane(conditions, seed + 1))
        self._path_clock = PathClock()
        self._by_hand = PathState.UP
        self._state = PathState.UP
        self._cuts_done = 0
        self._started_s = self._clock.now()

        self._pairs: set[RelayedConnection] = set()
        self._accepted = 0
        self._refused = 0
        self._moved_bytes = [0, 0]
        self._held_bytes = 0
        self._held_peak_bytes = 0
        self._to_damage = 0
        self._damaged = 0
        self._forwards = LatenessCounter()
        self._wakeups = LatenessCounter()
        self._order = itertools.count(1)

        self._selector = selectors.DefaultSelector()
        # One selector per direction, nested in the main one while its lane takes chunks: a full
        # lane then costs one system call, not one per connection.
        self._sources = (selectors.DefaultSelector(), selectors.DefaultSelector())
        self._watching = [False, False]
        self._due: tuple[list[tuple[float, int, RelayFlow]], ...] = ([], [])
        self._orders: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._woken)
        self._stopping = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._open_doors()

    # Control ---------------------------------------------------------------------------------

    def change(self, conditions: Conditions) -> None:
        """Bytes on their way keep the time they were given. The timetable starts anew."""
        self._order_and_wait(lambda: self._apply(conditions))

    def stall(self) -> None:
        """Nothing moves until `restore`; connections stay."""
        self._order_and_wait(lambda: self._set_by_hand(PathState.STALLED))

    def outage(self) -> None:
        """Nothing moves until `restore`; new connections are refused."""
        self._order_and_wait(lambda: self._set_by_hand(PathState.OUT))

    def restore(self) -> None:
        self._order_and_wait(lambda: self._set_by_hand(PathState.UP))

    def cut(self) -> None:
        """Resets every connection on both sides. What was on its way is lost."""
        self._order_and_wait(self._cut)

    def damage(self, chunks: int) -> None:
        """One bit of each of the next so many large chunks for the target is flipped."""

        def apply() -> None:
            self._to_damage = chunks

        self._order_and_wait(apply)

    @property
    def addresses(self) -> list[Address]:
        return [door.address for door in self._doors]

    @property
    def conditions(self) -> Conditions:
        return self._conditions

    @property
    def stats(self) -> RelayStats:
        return RelayStats(
            connections=len(self._pairs),
            accepted=self._accepted,
            refused=self._refused,
            to_target_bytes=self._moved_bytes[0],
            to_client_bytes=self._moved_bytes[1],
            held_bytes=self._held_bytes,
            held_peak_bytes=self._held_peak_bytes,
            damaged=self._damaged,
            forwards=self._forwards.count,
            forward_late_s=self._forwards.total_s,
            forward_late_peak_s=self._forwards.peak_s,
            wakeups=self._wakeups.count,
            wakeup_late_s=self._wakeups.total_s,
            wakeup_late_peak_s=self._wakeups.peak_s,
        )

    def start(self) -> Relay:
        self._thread = threading.Thread(target=self.run, name=f"wan {self.address}", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends `run` soon; for signal handlers and other threads."""
        self._stopping = True
        self._wake()

    def close(self) -> None:
        """Ends the loop and resets what is still connected. May be called twice."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_CONTROL_TIMEOUT_S)
            assert not self._thread.is_alive(), "the relay's loop does not end"
            self._thread = None
        if self._closed:
            return
        self._closed = True
        self._cut()
        self._close_doors()
        for door in self._doors:
            door.close()
        for sock in (self._wake_in, self._wake_out):
            sock.close()
        for selector in (*self._sources, self._selector):
            selector.close()

    def __enter__(self) -> Relay:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Relay {self.address} {self._state.name.lower()}, {len(self._pairs)} connections, "
            f"{self._held_bytes} bytes on the way>"
        )

    # The loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Moves bytes until `stop`."""
        while not self._stopping:
            now_s = self._clock.now()
            self._keep_timetable(now_s)
            path_s = self._path_clock.read(now_s)
            moving = self._state is PathState.UP
            for direction in (0, 1):
                if moving:
                    self._take_in(direction, path_s)
                    self._let_out(direction, path_s)
                room = moving and self._lanes[direction].wait_s(path_s) == 0.0
                self._watch(direction, room)
            for key, _ in self._select(self._wait_s(now_s, path_s)):
                # A handler earlier in this round may have closed what a later one is about.
                if key.fd in self._selector.get_map():
                    key.data()

    def _select(self, wait_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        until_s = self._clock.now() + wait_s
        found = self._selector.select(wait_s)
        if not found:
            self._wakeups.add(self._clock.now() - until_s)
        return found

    def _wait_s(self, now_s: float, path_s: float) -> float:
        elapsed_s = now_s - self._started_s
        wait_s = min(_LONGEST_WAIT_S, self._conditions.until_change_s(elapsed_s))
        if self._state is PathState.UP:
            for direction in (0, 1):
                if self._due[direction]:
                    wait_s = min(wait_s, self._due[direction][0][0] - path_s)
                if not self._watching[direction] and self._pairs:
                    wait_s = min(wait_s, self._lanes[direction].wait_s(path_s))
        return max(0.0, wait_s)

    def _keep_timetable(self, now_s: float) -> None:
        elapsed_s = now_s - self._started_s
        cuts_due = self._conditions.cuts_until(elapsed_s)
        if cuts_due > self._cuts_done:
            self._cuts_done = cuts_due
            self._cut()
        for pair in [p for p in self._pairs if p.connecting_until_s is not None]:
            assert pair.connecting_until_s is not None
            if now_s >= pair.connecting_until_s:
                self._refuse(pair)
        state = max(self._by_hand, self._conditions.scheduled_state(elapsed_s))
        if state is self._state:
            return
        if state is PathState.UP:
            self._path_clock.go(now_s)
        else:
            self._path_clock.stop(now_s)
        if state is PathState.OUT:
            self._accept_waiting()
            self._close_doors()
        else:
            self._open_doors()
        self._state = state

    def _take_in(self, direction: int, path_s: float) -> None:
        """Reads until the lane is booked. Least recently read first: each connection has its
        share of the lane, however much the others offer."""
        lane = self._lanes[direction]
        if lane.wait_s(path_s) > 0 or not self._sources[direction].get_map():
            return
        flows: list[RelayFlow] = [key.data for key, _ in self._sources[direction].select(0)]
        for flow in sorted(flows, key=lambda flow: flow.served):
            if lane.wait_s(path_s) > 0:
                return
            if flow.reading:
                self._read(flow, path_s)

    def _read(self, flow: RelayFlow, path_s: float) -> None:
        flow.served = next(self._order)
        try:
            data = flow.source.recv(self._conditions.chunk_bytes)
        except BlockingIOError:
            return
        except OSError:
            self._lost(flow.source, flow.pair, path_s)
            return
        leaves_at_s = self._lanes[flow.direction].admit(len(data), path_s)
        if data:
            if self._to_damage and flow.direction == 0 and len(data) >= _DAMAGED_BYTES:
                data = self._flipped(data)
            flow.put(memoryview(data), leaves_at_s)
            self._held_bytes += len(data)
            self._held_peak_bytes = max(self._held_peak_bytes, self._held_bytes)
        else:
            flow.put(End.CLOSED, leaves_at_s)
        self._read_or_not(flow)
        self._queue(flow)

    def _flipped(self, data: bytes) -> bytes:
        self._to_damage -= 1
        self._damaged += 1
        changed = bytearray(data)
        changed[len(data) // 2] ^= 0x10
        return bytes(changed)

    def _let_out(self, direction: int, path_s: float) -> None:
        due = self._due[direction]
        while due and due[0][0] <= path_s:
            leaves_at_s, _, flow = heapq.heappop(due)
            flow.in_heap = False
            if flow.pair.open:
                if not flow.held_up:
                    self._forwards.add(self._path_clock.read(self._clock.now()) - leaves_at_s)
                self._write(flow, path_s)

    def _write(self, flow: RelayFlow, path_s: float) -> None:
        before_bytes = flow.held_bytes
        try:
            end = flow.send_due(path_s)
            if end is End.CLOSED:
                flow.target.shutdown(socket.SHUT_WR)
        except OSError:
            self._account(flow, before_bytes)
            self._lost(flow.target, flow.pair, path_s)
            return
        self._account(flow, before_bytes)
        if end is End.RESET:
            self._drop_pair(flow.pair, reset=True)
        elif all(other.finished for other in flow.pair.flows):
            self._drop_pair(flow.pair, reset=False)
        elif flow.blocked:
            self._selector.register(
                flow.target, selectors.EVENT_WRITE, lambda: self._writable(flow)
            )
        else:
            self._queue(flow)
        if flow.pair.open:
            self._read_or_not(flow)

    def _account(self, flow: RelayFlow, before_bytes: int) -> None:
        sent_bytes = before_bytes - flow.held_bytes
        self._moved_bytes[flow.direction] += sent_bytes
        self._held_bytes -= sent_bytes

    def _writable(self, flow: RelayFlow) -> None:
        # Queued again, not written at once: a stalled path writes nothing.
        self._selector.unregister(flow.target)
        flow.blocked = False
        self._queue(flow)

    def _queue(self, flow: RelayFlow) -> None:
        if flow.queue and not flow.in_heap and not flow.blocked:
            flow.in_heap = True
            entry = (flow.queue[0].leaves_at_s, next(self._order), flow)
            heapq.heappush(self._due[flow.direction], entry)

    def _read_or_not(self, flow: RelayFlow) -> None:
        """Stops reading a connection that holds its share, until half of it has left."""
        limit_bytes = self._conditions.held_bytes
        wanted = flow.held_bytes < (limit_bytes if flow.reading else limit_bytes / 2)
        self._set_reading(flow, wanted and not flow.ended)

    def _set_reading(self, flow: RelayFlow, reading: bool) -> None:
        if reading != flow.reading:
            flow.reading = reading
            if reading:
                self._sources[flow.direction].register(flow.source, selectors.EVENT_READ, flow)
            else:
                self._sources[flow.direction].unregister(flow.source)

    def _watch(self, direction: int, watching: bool) -> None:
        if watching != self._watching[direction]:
            self._watching[direction] = watching
            source = self._sources[direction]
            if watching:
                self._selector.register(source.fileno(), selectors.EVENT_READ, _nothing)
            else:
                self._selector.unregister(source.fileno())

    # Connections -----------------------------------------------------------------------------

    def _open_doors(self) -> None:
        for door in self._doors:
            if door.listener is None:
                accept = partial(self._accept, door)
                self._selector.register(door.open(), selectors.EVENT_READ, accept)

    def _close_doors(self) -> None:
        for door in self._doors:
            if door.listener is not None:
                self._selector.unregister(door.listener)
                door.listener.close()
                door.listener = None

    def _accept_waiting(self) -> None:
        """Accepts every connection whose handshake the kernel has completed: an outage keeps
        connections, but closing a listener resets those that still wait in its queue. The kernel
        resets a client whose handshake completes between this and the closing; no listener can
        prevent that."""
        for door in self._doors:
            while door.listener is not None and self._accept(door):
                pass

    def _accept(self, door: _Door) -> bool:
        """Accepts one connection; False when none waits."""
        assert door.listener is not None
        try:
            client, _ = door.listener.accept()
        except OSError:
            return False  # the client disconnected first
        self._accepted += 1
        if len(self._pairs) >= MAX_CONNECTIONS:
            self._refused += 1
            close(client, reset=True)
            return True
        try:
            server = socket.socket(door.family, socket.SOCK_STREAM)
        except OSError:  # out of descriptors
            self._refused += 1
            close(client, reset=True)
            return True
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER_BYTES)
        pair = RelayedConnection(client, server, self._clock.now() + CONNECT_TIMEOUT_S)
        self._pairs.add(pair)
        server.connect_ex(door.target)
        self._selector.register(server, selectors.EVENT_WRITE, lambda: self._connected(pair))
        return True

    def _connected(self, pair: RelayedConnection) -> None:
        if pair.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._refuse(pair)
            return
        self._selector.unregister(pair.server)
        pair.connecting_until_s = None
        for flow in pair.flows:
            self._set_reading(flow, True)

    def _refuse(self, pair: RelayedConnection) -> None:
        self._refused += 1
        self._drop_pair(pair, reset=True)

    def _lost(self, dead: socket.socket, pair: RelayedConnection, path_s: float) -> None:
        """One end was reset: what is meant for it is dropped, and the other end hears of it after
        the bytes that are already on their way to it."""
        for flow in pair.flows:
            self._set_reading(flow, False)
            if flow.target is dead:
                self._held_bytes -= flow.held_bytes
                flow.drop()
                flow.finished = True
            else:
                flow.put(End.RESET, self._lanes[flow.direction].admit(0, path_s))
                self._queue(flow)

    def _drop_pair(self, pair: RelayedConnection, *, reset: bool) -> None:
        pair.open = False
        self._pairs.discard(pair)
        for flow in pair.flows:
            self._set_reading(flow, False)
            self._held_bytes -= flow.held_bytes
            flow.drop()
        for sock in (pair.client, pair.server):
            if sock.fileno() in self._selector.get_map():
                self._selector.unregister(sock)
            close(sock, reset=reset)

    def _cut(self) -> None:
        for pair in list(self._pairs):
            self._drop_pair(pair, reset=True)

    # Orders ----------------------------------------------------------------------------------

    def _apply(self, conditions: Conditions) -> None:
        self._conditions = conditions
        for lane in self._lanes:
            lane.conditions = conditions
        self._started_s = self._clock.now()
        self._cuts_done = 0
        for pair in self._pairs:
            if pair.connecting_until_s is None:
                for flow in pair.flows:
                    self._read_or_not(flow)
        self._keep_timetable(self._started_s)

    def _set_by_hand(self, state: PathState) -> None:
        self._by_hand = state
        self._keep_timetable(self._clock.now())

    def _order_and_wait(self, action: Callable[[], None]) -> None:
        done = threading.Event()
        self._orders.append((action, done))
        self._wake()
        if not done.wait(_CONTROL_TIMEOUT_S):
            raise TimeoutError(f"{self!r} does not answer: is it running?")

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"!")
        except OSError:
            pass  # full: it wakes anyway; closed: nobody is there to be woken

    def _woken(self) -> None:
        self._wake_out.recv(4096)
        while self._orders:
            action, done = self._orders.popleft()
            action()
            done.set()


def _nothing() -> None:
    """The next round of the loop looks at the sources itself."""


def describe(conditions: Conditions) -> str:
    """`1 Gbit/s, 60 ms round trip, stalls 1 s every 10 s`."""
    rate = conditions.rate_bps
    parts = [
        "no rate limit" if rate is None else f"{rate / 1e9:g} Gbit/s",
        f"{conditions.rtt_s * 1e3:g} ms round trip",
    ]
    if conditions.jitter_s:
        parts.append(f"up to {conditions.jitter_s * 1e3:g} ms jitter")
    for name, fault in (("stalls", conditions.stall), ("outages", conditions.outage)):
        if fault:
            parts.append(f"{name} {fault.for_s:g} s every {fault.every_s:g} s")
    if conditions.cut_every_s is not None:
        parts.append(f"cuts every {conditions.cut_every_s:g} s")
    return ", ".join(parts)


def _resolve(address: Address) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        family, _, _, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise InputError(f"{address.host}: {error.strerror}", fix="check the host name") from None
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
