"""A TCP relay between sender and receiver that misbehaves on command."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

Meddle = Callable[[int, int, bytes], bytes | None]
"""(connection number, bytes of this direction so far, data) -> what to pass on; None cuts."""


class Proxy:
    def __init__(
        self,
        target: tuple[str, int],
        *,
        forward: Meddle | None = None,
        backward: Meddle | None = None,
    ) -> None:
        self._target = target
        self._meddle = (forward, backward)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._open = True
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.connections = 0

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        _close(self._server)
        self.cut_all()
        for thread in self._threads:
            thread.join(10)

    def cut_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                _close(sock)

    def _accept(self) -> None:
        while self._open:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
            except OSError:
                continue
            with self._lock:
                number = self.connections
                self.connections += 1
                self._pairs.append((near, far))
            for source, sink, meddle in (
                (near, far, self._meddle[0]),
                (far, near, self._meddle[1]),
            ):
                thread = threading.Thread(
                    target=self._pump, args=(number, source, sink, meddle), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pump(
        self, number: int, source: socket.socket, sink: socket.socket, meddle: Meddle | None
    ) -> None:
        seen = 0
        try:
            while data := source.recv(65536):
                passed: bytes | None = data
                if meddle is not None:
                    passed = meddle(number, seen, data)
                seen += len(data)
                if passed is None:
                    break
                sink.sendall(passed)
        except OSError:
            pass
        _close(source)
        _close(sink)


def _close(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()
