"""Stands between an engine and its kvd, and may keep back which state is ready until the commit.

With `holding` a prefill is pushed after it has ended instead of while it runs: what `bench overlap`
compares with, and how a test stops a transfer half-way. Engine and kvd are the real ones and know
nothing of it; everything else passes through, the arena's descriptor included.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path

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
    """`with ReadyGate(path, kvd_socket) as gate:`; engines are given `path` as their kvd."""

    def __init__(self, path: Path, kvd: Path | str, clock: Clock | None = None) -> None:
        self.path = path
        self.holding = False  # may be changed while no prefill is under way
        self.registered: queue.SimpleQueue[Register] = queue.SimpleQueue()
        self.commits: queue.SimpleQueue[float] = queue.SimpleQueue()  # when each came
        self._kvd = str(kvd)
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._held: dict[int, list[Ready]] = {}  # by lease; its writers may be several processes
        self._sockets: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> ReadyGate:
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
                _end(engine)  # as an engine finds a kvd that has gone
                continue
            for pump in (self._calls, self._answers):
                thread = threading.Thread(target=pump, args=(engine, kvd), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _calls(self, engine: socket.socket, kvd: socket.socket) -> None:
        frames = FrameReader()
        with suppress(OSError, WireError):
            while data := engine.recv(_READ_BYTES):
                passing = [self._through(decode_call(body)) for body in frames.feed(data)]
                kvd.sendall(b"".join(passing))
        _end(kvd)

    def _through(self, numbered: NumberedCall) -> bytes:
        """What of it, and of what was held before, goes on."""
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
                # On the connection of the commit, which must not overtake it: its process owns the
                # lease, whoever wrote.
                released = self._held.pop(call.lease_id, [])
        return b"".join([*(frame(NumberedCall(0, ready)) for ready in released), frame(numbered)])

    def _answers(self, engine: socket.socket, kvd: socket.socket) -> None:
        with suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(kvd, _READ_BYTES, 1)
                if not data:
                    break
                if descriptors:
                    sent = socket.send_fds(engine, [data], descriptors)
                    data = data[sent:]
                    for descriptor in descriptors:
                        os.close(descriptor)
                engine.sendall(data)
        _end(engine)


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
