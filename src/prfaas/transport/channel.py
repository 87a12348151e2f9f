"""A connected TCP socket, plain or TLS, that sends and receives whole frames; silence is an error.

The socket blocks, with kernel timeouts: one system call moves a full megabyte without the GIL, and
the thread still returns every `TICK_S` to check whether it should stop. Only this module converts
OS errors to `ConnectionLost`.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable
from typing import cast

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address
from prfaas.errors import ConnectionLost
from prfaas.transport.buffers import FileRange

TICK_S = 0.25
DISCARD_BYTES = 1 << 20  # at a time: what a peer without a grant sends takes no more memory
_TIMEVAL = struct.Struct("@ll")
_IOV_MAX = 1_024  # maximum number of buffers in one system call
# Per call, which returns only when all of them are sent: at 8 Mbit/s that takes a tick.
_TLS_SEND_BYTES = 256 << 10
_TLS_RECORD_BYTES = 16 << 10  # the most that one call receives


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
    """Not thread-safe: one thread at a time sends and receives. Any thread may call `interrupt`."""

    def __init__(
        self, sock: socket.socket, clock: Clock, silence_s: float, *, send_files: bool = True
    ) -> None:
        """`send_files` is False on hosts where `sendfile` is slower than a copy
        (`host_speed.choose_sending`)."""
        self._sock = sock
        self._clock = clock
        self._silence_s = silence_s
        # A frame that is not complete by then breaks the connection, even while bytes arrive.
        self.until_s = math.inf
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._send_files = send_files
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
        """False with TLS: this process encrypts, so it must read the bytes. Also False on hosts
        where `sendfile` is slower than a copy."""
        return self._send_files and not self._tls

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
                    now = self._clock.now()
                    silent_until = self._check_progress(sent, silent_until, now)
                    ticks.call_if_due(now)

    def receive(
        self,
        views: list[memoryview],
        nbytes: int,
        meanwhile: Callable[[int], None] | None = None,
    ) -> None:
        """Fills all views (`nbytes` together) or raises ConnectionLost. While the bytes take longer
        than a tick, calls `meanwhile` with the number of bytes received so far."""
        got = self.receive_some(views)
        if got != nbytes:
            self._receive_rest(list(views), got, meanwhile)

    def receive_if_any(self, view: memoryview, *, wait: bool) -> bool:
        """Fills `view`. Returns False when no byte is available (with `wait`: within a tick)."""
        if not wait and self._sock.fileno() not in self.wait(0):
            return False
        got = self.receive_some([view])
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

    def interrupt(self) -> None:
        """Ends the connection: a thread that is inside `send`, `receive` or `wait` returns, and the
        next call raises ConnectionLost. Any thread may call it; `close` is still required."""
        shut_down(self._sock)

    def close(self, *, discard_unsent: bool = False) -> None:
        """Call this from the thread that uses the channel. With `discard_unsent` the kernel drops
        bytes that it has not sent, so that it no longer reads the owner's memory."""
        try:
            if discard_unsent:
                at_once = struct.pack("@ii", 1, 0)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        except OSError:
            pass  # the connection is closed already
        shut_down(self._sock)
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
            now = self._clock.now()
            if now >= self.until_s:
                raise ConnectionLost("the frame did not arrive in time")
            if got:
                silent_until = now + self._silence_s
            elif now >= silent_until:
                raise ConnectionLost(f"the peer sent nothing for {self._silence_s:g} s")
            got = self.receive_some(views)

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
                now = self._clock.now()
                silent_until = self._check_progress(sent, silent_until, now)
                meanwhile.call_if_due(now)

    def _check_progress(self, sent: int, silent_until: float, now: float) -> float:
        """Returns the new end of the silence timeout; raises ConnectionLost when it is over."""
        if now >= self.until_s:
            raise ConnectionLost("the peer did not accept the frame in time")
        if sent:
            return now + self._silence_s
        if now >= silent_until:
            raise ConnectionLost(f"the peer accepted no bytes for {self._silence_s:g} s")
        return silent_until

    def _send_some(self, views: list[memoryview], flags: int = 0) -> int:
        try:
            if self._tls:
                return self._sock.send(views[0][:_TLS_SEND_BYTES])
            some = views if len(views) <= _IOV_MAX else views[:_IOV_MAX]
            return self._sock.sendmsg(some, (), flags)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except (OSError, ValueError) as error:
            raise _lost(error) from None

    def receive_some(self, views: list[memoryview]) -> int:
        """Fills the views as far as bytes arrive within a tick, and returns their number."""
        try:
            if self._tls:
                return self._receive_records(views)
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

    def _receive_records(self, views: list[memoryview]) -> int:
        """Receives until all views are full or a tick has passed. TLS returns one record (16 KiB)
        per call, hence the loop."""
        assert isinstance(self._sock, ssl.SSLSocket)
        # This loop is most of what Python adds to the cost of TLS: `read` costs one call less than
        # `recv_into`, 6% of the receiver's CPU time. With a buffer it returns a number.
        read = cast("Callable[[int, memoryview], int]", self._sock.read)
        now, total = self._clock.now, 0
        until_s = now() + TICK_S
        try:
            for view in views:
                size, at = view.nbytes, 0
                while at < size:
                    got = read(_TLS_RECORD_BYTES, view[at:])
                    if got == 0:
                        raise ConnectionLost("the peer closed the connection")
                    at += got
                    total += got
                    if now() >= until_s:
                        return total
        except ssl.SSLWantReadError:
            pass  # a tick passed without a record; the bytes received before it count
        return total

    def _pending(self) -> bool:
        assert isinstance(self._sock, ssl.SSLSocket)
        return self._sock.pending() > 0


class TimeLimit:
    """The end of an attempt to connect, and whether the attempt is still wanted."""

    def __init__(
        self, seconds: float, clock: Clock, abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        self._clock = clock
        self._until_s = clock.now() + seconds
        self._abandoned = abandoned

    @property
    def left_s(self) -> float:
        return self._until_s - self._clock.now()

    def check(self) -> None:
        """Raises TimeoutError when the time is over, ConnectionLost when nothing needs the
        connection any more."""
        if self._abandoned():
            raise ConnectionLost("the connection is no longer needed")
        if self.left_s <= 0:
            raise TimeoutError

    def share(self, parts: int) -> TimeLimit:
        """One of `parts` equal parts of the time that is left."""
        return TimeLimit(max(0.0, self.left_s) / parts, self._clock, self._abandoned)

    def wait_for(self, sock: socket.socket, events: int) -> None:
        """Waits until the socket is ready; raises as `check` does."""
        poll = select.poll()
        poll.register(sock, events)
        while not poll.poll(min(TICK_S, max(0.0, self.left_s)) * 1e3):
            self.check()


def connect(
    address: tuple[str, int],
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None,
    tls_name: str | None = None,
    congestion_control: str | None = None,
    buffer_bytes: int | None = None,
    abandoned: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """Returns a connected socket with this project's socket options; raises ConnectionLost. The
    timeout covers all addresses of the host and the whole TLS handshake. The attempt ends soon
    after `abandoned` returns True."""
    name = Address(*address)
    limit = TimeLimit(timeout_s, MonotonicClock(), abandoned)
    sock = _connect_tcp(name, limit, timeout_s, congestion_control, buffer_bytes)
    if tls is None:
        return sock
    try:
        wrapped = tls.wrap_socket(
            sock, server_hostname=tls_name or name.host, do_handshake_on_connect=False
        )
        sock = wrapped
        shake_hands(wrapped, limit)
        return wrapped
    except TimeoutError:
        sock.close()
        raise ConnectionLost(f"{name}: no TLS handshake within {timeout_s:g} s") from None
    except ConnectionLost:
        sock.close()
        raise
    except (OSError, ValueError) as error:
        sock.close()
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
        raise ConnectionLost(f"{name}: TLS: {reason}") from None


def shake_hands(sock: ssl.SSLSocket, limit: TimeLimit) -> None:
    """Completes the TLS handshake of a socket that does not block. The limit holds for the whole
    handshake: a peer that sends it byte by byte gets no more time."""
    while True:
        limit.check()
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            limit.wait_for(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            limit.wait_for(sock, select.POLLOUT)


def shut_down(sock: socket.socket) -> None:
    """Ends a connection that another thread may be using, without closing its descriptor: a closed
    descriptor's number may belong to another connection a moment later."""
    try:
        # Not `SSLSocket.shutdown`, which takes the TLS state away from the thread that uses it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # the connection is closed already


def _connect_tcp(
    name: Address,
    limit: TimeLimit,
    timeout_s: float,
    congestion_control: str | None,
    buffer_bytes: int | None,
) -> socket.socket:
    try:
        found = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionLost(f"{name}: {error.strerror or error}") from None
    except ValueError as error:  # UnicodeError for a label that is too long, and zero bytes
        raise ConnectionLost(f"{name}: is not a host name: {error}") from None
    problem = f"{name} has no address"
    for tried, (family, kind, protocol, _, where) in enumerate(found):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            problem = f"{name}: {error.strerror or error}"
            continue
        try:
            set_options(sock, congestion_control, buffer_bytes)
        except OSError as error:
            sock.close()
            raise ConnectionLost(
                f"cannot use congestion control {congestion_control!r}: {error.strerror}"
            ) from None
        try:
            sock.setblocking(False)
            code = sock.connect_ex(where)
            if code == errno.EINPROGRESS:
                limit.share(len(found) - tried).wait_for(sock, select.POLLOUT)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return sock
            problem = f"{name}: {os.strerror(code)}"
        except TimeoutError:
            problem = f"{name} did not answer within {timeout_s:g} s"
        except ConnectionLost:
            sock.close()
            raise
        except OSError as error:
            problem = f"{name}: {error.strerror or error}"
        sock.close()
    raise ConnectionLost(problem)


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
