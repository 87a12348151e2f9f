"""A proxy between an engine and its kvd that can hold back READY messages until the commit.

With `holding` the kvd pushes a prefill after it has ended instead of while it runs. A test uses it
to stop a transfer half-way. Engine and kvd are the
real ones and are not aware of the proxy. All other messages pass through, including the arena's
descriptor.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from prfaas.clock import Clock, MonotonicClock
from prfaas.errors import WireError
from prfaas.kvd.engine_socket.messages import (
    Commit,
    FrameReader,
    NumberedCall,
    Ready,
    Register,
    decode_call,
    frame,
)

_READ_BYTES = 1 << 16
_END_S = 10.0


class ReadyGate:
    """`with ReadyGate(path, kvd_socket) as gate:`; engines use `path` as their kvd's socket."""

    def __init__(self, path: Path, kvd: Path | str, clock: Clock | None = None) -> None:
        self.path = path
        self.holding = False  # change this only while no prefill runs
        self.registered: queue.SimpleQueue[Register] = queue.SimpleQueue()
        self.commits: queue.SimpleQueue[float] = queue.SimpleQueue()  # time of each commit
        self._kvd = str(kvd)
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        # By lease: several processes may write to one lease.
        self._held: dict[int, list[Ready]] = {}
        self._sockets: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._server)
        self._threads[0].join(_END_S)  # no new connections from here on
        for sock in self._sockets:
            _end(sock)
        for thread in self._threads[1:]:
            thread.join(_END_S)
        for sock in (self._server, *self._sockets):
            sock.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                engine, _ = self._server.accept()
            except OSError:
                return  # closed
            kvd = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sockets += (engine, kvd)
            try:
                kvd.connect(self._kvd)
            except OSError:
                _end(engine)  # the engine sees the same as for a kvd that is gone
                continue
            for pump in (self._forward_calls, self._forward_responses):
                thread = threading.Thread(target=pump, args=(engine, kvd), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward_calls(self, engine: socket.socket, kvd: socket.socket) -> None:
        frames = FrameReader()
        with suppress(OSError, WireError):
            while data := engine.recv(_READ_BYTES):
                passing = [self._filter(engine, decode_call(body)) for body in frames.feed(data)]
                kvd.sendall(b"".join(passing))
        _end(kvd)

    def _filter(self, engine: socket.socket, numbered: NumberedCall) -> bytes:
        """Returns the bytes to forward: of this message, and of messages held before it."""
        call = numbered.call
        if isinstance(call, Ready) and self.holding:
            with self._lock:
                self._held.setdefault(call.lease_id, []).append(call)
            return b""
        released: list[Ready] = []
        if isinstance(call, Register):
            self.registered.put(call)
        elif isinstance(call, Commit):
            self.commits.put(self._clock.now())
            with self._lock:
                # Use the connection of the commit, so that the commit does not overtake them. The
                # committing process owns the lease, although others may have written to it.
                released = self._held.pop(call.lease_id, [])
        return b"".join([*(frame(NumberedCall(0, ready)) for ready in released), frame(numbered)])

    def _forward_responses(self, engine: socket.socket, kvd: socket.socket) -> None:
        with suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(kvd, _READ_BYTES, 1)
                if not data:
                    break
                self._watch(engine, data, descriptors)
                if descriptors:
                    sent = socket.send_fds(engine, [data], descriptors)
                    data = data[sent:]
                    for descriptor in descriptors:
                        os.close(descriptor)
                engine.sendall(data)
        _end(engine)

    def _watch(self, engine: socket.socket, data: bytes, descriptors: list[int]) -> None:
        """Sees what the kvd answers, before the engine sees it. The caller closes `descriptors`."""


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
