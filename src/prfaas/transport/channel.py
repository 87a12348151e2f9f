"""A connected TCP socket, plain or TLS: whole frames in and out, silence is an error.

Blocking sockets with kernel timeouts: a full megabyte moves in one system call without the GIL, and
a thread still looks up every `TICK_S` to see whether it should stop. OS errors become
`ConnectionLost` here and nowhere else.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost

TICK_S = 0.25
_TIMEVAL = struct.Struct("@ll")
_IOV_MAX = 1_024  # buffers that one system call takes
_TLS_RECORD_BYTES = 16 << 10


class Channel:
    """Not thread-safe: one thread at a time sends and receives. `close` may come from any."""

    def __init__(self, sock: socket.socket, clock: Clock, silence_s: float) -> None:
        self._sock = sock
        self._clock = clock
        self._silence_s = silence_s
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.settimeout(None)
        ticks = _TIMEVAL.pack(int(TICK_S), int(TICK_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, ticks)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, ticks)

    def fileno(self) -> int:
        return self._sock.fileno()

    def option(self, level: int, name: int, nbytes: int) -> bytes:
        """A socket option of the connection, such as TCP_INFO."""
        with _translated():
            return self._sock.getsockopt(level, name, nbytes)

    def watch(self, other: socket.socket) -> None:
        """`wait` also returns when `other` is readable."""
        self._poll.register(other, select.POLLIN)

    def wait(self, timeout_s: float) -> set[int]:
        """File descriptors that are readable, or broken, within the time."""
        if self._tls and self._pending():
            return {self._sock.fileno()}
        with _translated():
            return {fd for fd, _ in self._poll.poll(timeout_s * 1e3)}

    def send(self, views: list[memoryview]) -> None:
        """All of it, or ConnectionLost."""
        quiet_until = self._clock.now() + self._silence_s
        while views:
            with _translated():
                sent = self._send_some(views)
            now = self._clock.now()
            if sent:
                quiet_until = now + self._silence_s
                _drop(views, sent)
            elif now >= quiet_until:
                raise ConnectionLost(f"peer took nothing for {self._silence_s:g} s")

    def receive(self, views: list[memoryview]) -> None:
        """Fills all of it, or ConnectionLost."""
        quiet_until = self._clock.now() + self._silence_s
        while views:
            with _translated():
                got = self._receive_some(views)
            now = self._clock.now()
            if got:
                quiet_until = now + self._silence_s
                _drop(views, got)
            elif now >= quiet_until:
                raise ConnectionLost(f"peer sent nothing for {self._silence_s:g} s")

    def receive_if_any(self, view: memoryview) -> bool:
        """Fills `view`; False when nothing at all came within a tick."""
        with _translated():
            got = self._receive_some([view])
        if got:
            self.receive([view[got:]] if got < view.nbytes else [])
        return got > 0

    def receive_available(self, limit: int = 64 << 10) -> bytes:
        """What has come so far, at least one byte; only after `wait` said so."""
        with _translated():
            try:
                data = self._sock.recv(limit)
            except (BlockingIOError, ssl.SSLWantReadError):
                return b""
        if not data:
            raise ConnectionLost("closed by peer")
        return data

    def close(self) -> None:
        """Wakes a thread that is inside `send` or `receive`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more
        self._sock.close()

    def _send_some(self, views: list[memoryview]) -> int:
        try:
            if self._tls:
                return self._sock.send(views[0])
            return self._sock.sendmsg(views[:_IOV_MAX])
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def _receive_some(self, views: list[memoryview]) -> int:
        try:
            if self._tls:
                got = self._sock.recv_into(views[0])
            else:
                got = self._sock.recvmsg_into(views[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        if got == 0:
            raise ConnectionLost("closed by peer")
        return got

    def _pending(self) -> bool:
        assert isinstance(self._sock, ssl.SSLSocket)
        return self._sock.pending() > 0


def connect(
    address: tuple[str, int],
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None,
    congestion_control: str | None,
    buffer_bytes: int | None,
) -> socket.socket:
    """A connected socket with our options set; ConnectionLost says what to look at."""
    host, port = address
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except TimeoutError:
        raise ConnectionLost(f"{host}:{port} does not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ConnectionLost(f"{host}:{port}: {error.strerror or error}") from None
    try:
        tune(sock, congestion_control, buffer_bytes)
        if tls is not None:
            return tls.wrap_socket(sock, server_hostname=host)
        return sock
    except TimeoutError:
        sock.close()
        raise ConnectionLost(f"{host}:{port}: no TLS handshake within {timeout_s:g} s") from None
    except OSError as error:
        sock.close()
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        raise ConnectionLost(f"{host}:{port}: TLS: {reason}") from None


def tune(sock: socket.socket, congestion_control: str | None, buffer_bytes: int | None) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if buffer_bytes is not None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    if congestion_control is not None:
        name = congestion_control.encode()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectionLost(f"connection broke: {error.strerror or error}") from None
    except ValueError:
        raise ConnectionLost("closed on this side") from None


def _drop(views: list[memoryview], nbytes: int) -> None:
    """Removes the first `nbytes` in place."""
    whole = 0
    while whole < len(views) and nbytes >= views[whole].nbytes:
        nbytes -= views[whole].nbytes
        whole += 1
    del views[:whole]
    if nbytes:
        views[0] = views[0][nbytes:]
