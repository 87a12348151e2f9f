"""A connected TCP socket, plain or TLS, that sends and receives whole frames; silence is an error.

The socket blocks, with kernel timeouts: one system call moves a full megabyte without the GIL, and
the thread still returns every `TICK_S` to check whether it should stop. Only this module converts
OS errors to `ConnectionLost`.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
from collections.abc import Callable

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost
from prfaas.transport.buffers import FileRange

TICK_S = 0.25
_TIMEVAL = struct.Struct("@ll")
_IOV_MAX = 1_024  # maximum number of buffers in one system call
_TLS_SEND_BYTES = 64 << 10  # per call


class _EveryTick:
    """Calls a function when a tick has passed since the last call, or since the start."""

    def __init__(self, call: Callable[[], None] | None, began_s: float) -> None:
        self._call = call
        self._due_s = began_s + TICK_S

    def call_if_due(self, now: float) -> None:
        if self._call is not None and now >= self._due_s:
            self._due_s = now + TICK_S
            self._call()


class Channel:
    """Not thread-safe: one thread at a time sends and receives. Any thread may call `close`."""

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
        try:
            return self._sock.getsockopt(level, name, nbytes)
        except (OSError, ValueError) as error:
            raise _lost(error) from None

    def watch(self, other: socket.socket) -> None:
        """Makes `wait` return also when `other` is readable."""
        self._poll.register(other, select.POLLIN)

    def wait(self, timeout_s: float) -> set[int]:
        """Waits up to the timeout. Returns the file descriptors that are readable or broken."""
        if self._tls and self._pending():
            return {self._sock.fileno()}
        try:
            return {fd for fd, _ in self._poll.poll(timeout_s * 1e3)}
        except (OSError, ValueError) as error:
            raise _lost(error) from None

    def send(
        self,
        views: list[memoryview],
        nbytes: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Sends all views (`nbytes` together) or raises ConnectionLost. Calls `meanwhile` once per
        tick while the bytes are being sent."""
        began_s = self._clock.now()
        sent = self._send_some(views)
        if sent != nbytes:
            views = list(views)
            _drop(views, sent)
            self._send_all(views, 0, _EveryTick(meanwhile, began_s))

    @property
    def can_send_files(self) -> bool:
        """False with TLS: this process encrypts, so it must read the bytes."""
        return not self._tls

    def send_files(
        self,
        head: memoryview,
        ranges: list[FileRange],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Sends `head` and then parts of files, which the kernel sends from its page cache. Calls
        `meanwhile` once per tick while the bytes are being sent."""
        ticks = _EveryTick(meanwhile, self._clock.now())
        self._send_all([head], socket.MSG_MORE, ticks)
        silent_until = self._clock.now() + self._silence_s
        for part in ranges:
            fd, offset, nbytes = part.fd, part.offset, part.nbytes
            while nbytes:
                try:
                    sent = os.sendfile(self._sock.fileno(), fd, offset, nbytes)
                except BlockingIOError:
                    sent = 0
                except (OSError, ValueError) as error:
                    raise _lost(error) from None
                offset += sent
                nbytes -= sent
                if nbytes:
                    silent_until = self._check_progress(sent, silent_until)
                    ticks.call_if_due(self._clock.now())

    def receive(
        self,
        views: list[memoryview],
        nbytes: int,
        meanwhile: Callable[[int], None] | None = None,
    ) -> None:
        """Fills all views (`nbytes` together) or raises ConnectionLost. While the bytes take longer
        than a tick, calls `meanwhile` with the number of bytes received so far."""
        got = self._receive_some(views)
        if got != nbytes:
            self._receive_rest(list(views), got, meanwhile)

    def receive_if_any(self, view: memoryview, *, wait: bool) -> bool:
        """Fills `view`. Returns False when no byte is available (with `wait`: within a tick)."""
        if not wait and self._sock.fileno() not in self.wait(0):
            return False
        got = self._receive_some([view])
        if 0 < got < view.nbytes:
            self._receive_rest([view], got)
        return got > 0

    def receive_available(self, limit: int = 64 << 10) -> bytes:
        """Receives the available bytes. Call this only after `wait` reported the socket."""
        try:
            data = self._sock.recv(limit)
        except (BlockingIOError, ssl.SSLWantReadError):
            return b""
        except (OSError, ValueError) as error:
            raise _lost(error) from None
        if not data:
            raise ConnectionLost("the peer closed the connection")
        return data

    def close(self, *, discard_unsent: bool = False) -> None:
        """Wakes a thread that is inside `send` or `receive`. With `discard_unsent` the kernel drops
        bytes that it has not sent, so that it no longer reads the owner's memory."""
        try:
            if discard_unsent:
                at_once = struct.pack("@ii", 1, 0)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the connection is closed already
        self._sock.close()

    def _receive_rest(
        self,
        views: list[memoryview],
        got: int,
        meanwhile: Callable[[int], None] | None = None,
    ) -> None:
        silent_until = self._clock.now() + self._silence_s
        total = 0
        while True:
            _drop(views, got)
            if not views:
                return
            total += got
            if meanwhile is not None:
                meanwhile(total)
            if got:
                silent_until = self._clock.now() + self._silence_s
            elif self._clock.now() >= silent_until:
                raise ConnectionLost(f"the peer sent nothing for {self._silence_s:g} s")
            got = self._receive_some(views)

    def _send_all(
        self,
        views: list[memoryview],
        flags: int,
        meanwhile: _EveryTick,
    ) -> None:
        silent_until = self._clock.now() + self._silence_s
        while views:
            sent = self._send_some(views, flags)
            _drop(views, sent)
            if views:
                silent_until = self._check_progress(sent, silent_until)
                meanwhile.call_if_due(self._clock.now())

    def _check_progress(self, sent: int, silent_until: float) -> float:
        """Returns the new end of the silence timeout; raises ConnectionLost when it is over."""
        now = self._clock.now()
        if sent:
            return now + self._silence_s
        if now >= silent_until:
            raise ConnectionLost(f"the peer accepted no bytes for {self._silence_s:g} s")
        return silent_until

    def _send_some(self, views: list[memoryview], flags: int = 0) -> int:
        try:
            if self._tls:
                # A large view would be sent in one call, however long that takes.
                return self._sock.send(views[0][:_TLS_SEND_BYTES])
            some = views if len(views) <= _IOV_MAX else views[:_IOV_MAX]
            return self._sock.sendmsg(some, (), flags)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except (OSError, ValueError) as error:
            raise _lost(error) from None

    def _receive_some(self, views: list[memoryview]) -> int:
        try:
            if self._tls:
                return self._receive_records(views[0])
            if len(views) == 1:
                got = self._sock.recv_into(views[0], 0, socket.MSG_WAITALL)
            else:
                some = views if len(views) <= _IOV_MAX else views[:_IOV_MAX]
                got = self._sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        except (OSError, ValueError) as error:
            raise _lost(error) from None
        if got == 0:
            raise ConnectionLost("the peer closed the connection")
        return got

    def _receive_records(self, view: memoryview) -> int:
        """Receives until the view is full or a tick has passed. TLS returns one record (16 KiB) per
        call, hence the loop."""
        receive_into, size, at = self._sock.recv_into, view.nbytes, 0
        until_s = self._clock.now() + TICK_S
        try:
            while at < size:
                got = receive_into(view[at:])
                if got == 0:
                    raise ConnectionLost("the peer closed the connection")
                at += got
                if self._clock.now() >= until_s:
                    break
        except ssl.SSLWantReadError:
            pass  # a tick passed without a record; the bytes received before it count
        return at

    def _pending(self) -> bool:
        assert isinstance(self._sock, ssl.SSLSocket)
        return self._sock.pending() > 0


def connect(
    address: tuple[str, int],
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None,
    tls_name: str | None = None,
    congestion_control: str | None = None,
    buffer_bytes: int | None = None,
) -> socket.socket:
    """Returns a connected socket with this project's socket options; raises ConnectionLost."""
    host, port = address
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except TimeoutError:
        raise ConnectionLost(f"{host}:{port} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ConnectionLost(f"{host}:{port}: {error.strerror or error}") from None
    except ValueError as error:  # not a host name: a label that is too long, or a null character
        raise ConnectionLost(f"{host!r}:{port}: {error}") from None
    try:
        set_options(sock, congestion_control, buffer_bytes)
    except OSError as error:
        sock.close()
        raise ConnectionLost(
            f"cannot use congestion control {congestion_control!r}: {error.strerror}"
        ) from None
    if tls is None:
        return sock
    try:
        return tls.wrap_socket(sock, server_hostname=tls_name or host)
    except TimeoutError:
        sock.close()
        raise ConnectionLost(f"{host}:{port}: no TLS handshake within {timeout_s:g} s") from None
    except OSError as error:
        sock.close()
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        raise ConnectionLost(f"{host}:{port}: TLS: {reason}") from None


def set_options(
    sock: socket.socket, congestion_control: str | None, buffer_bytes: int | None
) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if buffer_bytes is not None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    if congestion_control is not None:
        name = congestion_control.encode()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


def _lost(error: OSError | ValueError) -> ConnectionLost:
    """Python raises ValueError for a socket that another thread has closed."""
    if isinstance(error, OSError):
        return ConnectionLost(f"the connection broke: {error.strerror or error}")
    return ConnectionLost("the connection was closed on this side")


def _drop(views: list[memoryview], nbytes: int) -> None:
    """Removes the first `nbytes` in place."""
    whole = 0
    while whole < len(views) and nbytes >= views[whole].nbytes:
        nbytes -= views[whole].nbytes
        whole += 1
    del views[:whole]
    if nbytes:
        views[0] = views[0][nbytes:]
