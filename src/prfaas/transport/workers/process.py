"""One worker process, for the kvd: its main socket, its arenas and its connections."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from prfaas.errors import ConnectionLost
from prfaas.interpreter import module_command
from prfaas.security.tls import TlsContents
from prfaas.service.logging import configured_format
from prfaas.transport.workers.messages import (
    PACKET_BYTES,
    Done,
    MainOrder,
    Map,
    Ping,
    Serve,
    Unmap,
    UseCredentials,
    encode,
    read_done,
    socket_pair,
)

# A worker that does not answer its main socket for this long is killed. Senders give a transfer up
# that is not opened within 10 s: it has to be opened by the next worker before.
ANSWER_S = 5.0
_REAP_S = 10.0
# Mapped at the same time; a kvd has one for each form of the KV. Beyond that the oldest is unmapped
# and a connection that has just named that one in an order breaks.
_MAX_ARENAS = 8
_PROGRAM = "prfaas.transport.workers.worker"


class WorkerProcess:
    """Thread-safe. After `kill` every method raises ConnectionLost."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        """Starts the process; raises OSError."""
        self._main, theirs = socket_pair()
        with theirs:
            try:
                self._popen = _spawn(theirs.fileno())
            except OSError:
                self._main.close()
                raise
        self._answer_s = answer_s
        self._main.settimeout(answer_s)
        self._lock = threading.Lock()  # of the main socket: one order at a time
        self._credentials: TlsContents | None = None
        self._arenas: dict[tuple[int, int], int] = {}  # device and inode -> arena, the latest last
        self._next_arena = 0
        self._count_lock = threading.Lock()
        self._connections = 0

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def connections(self) -> int:
        return self._connections

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def end(self) -> str:
        """How the process has ended."""
        code = self._popen.poll()
        if code is None:
            return "still running"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def ping(self) -> None:
        """Raises ConnectionLost, and the process has been killed, when it does not answer."""
        with self._lock:
            self._order(Ping())

    def serve(
        self, serve: Serve, sock: socket.socket, credentials: TlsContents | None
    ) -> socket.socket:
        """The worker serves the connection from now on. Returns the socket for orders about the
        connection. The caller keeps `sock`, so that it can shut the connection
        down."""
        ours, theirs = socket_pair()
        with self._lock, theirs:
            try:
                if serve.tls is not None and credentials is not self._credentials:
                    assert credentials is not None
                    self._send_credentials(credentials)
                self._send(serve, [sock.fileno(), theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def join(self) -> None:
        """A connection will use this worker; `leave` has to follow."""
        with self._count_lock:
            self._connections += 1

    def leave(self) -> None:
        """A connection of this worker has ended, or was not made."""
        with self._count_lock:
            self._connections -= 1

    def arena(self, fd: int) -> int:
        """The number of this file in orders to the worker, which maps it when it is new."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        found = self._arenas.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._arenas.get(key)
            if found is None:
                if len(self._arenas) >= _MAX_ARENAS:
                    oldest = next(iter(self._arenas))
                    self._order(Unmap(self._arenas.pop(oldest)))
                found = self._next_arena
                self._next_arena += 1
                self._order(Map(found, status.st_size), [fd])
                self._arenas[key] = found
            return found

    def kill(self) -> None:
        """Returns when the process is gone, and uses no memory of the kvd any more."""
        self._popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_S)
        with suppress(OSError):
            self._main.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.kill()
        self._main.close()

    # The methods below require that the caller holds the lock -------------------------------------

    def _send_credentials(self, credentials: TlsContents) -> None:
        parts = (
            credentials.ca,
            credentials.cert,
            credentials.key,
            credentials.client_cert,
            credentials.client_key,
        )
        fd = os.memfd_create("prfaas-credentials", os.MFD_CLOEXEC)
        try:
            os.write(fd, b"".join(parts))
            ca, cert, key, client_cert, client_key = map(len, parts)
            self._order(UseCredentials((ca, cert, key, client_cert, client_key)), [fd])
        finally:
            os.close(fd)
        self._credentials = credentials

    def _order(self, order: MainOrder, files: Sequence[int] = ()) -> None:
        """Returns when the worker has carried the order out."""
        self._send(order, files)
        try:
            try:
                answer = self._main.recv(PACKET_BYTES)
            except TimeoutError:  # also after a pause of this process, in which the answer has come
                # Not MSG_DONTWAIT: Python waits for a socket with a timeout before it calls recv.
                self._main.setblocking(False)
                try:
                    answer = self._main.recv(PACKET_BYTES)
                finally:
                    self._main.settimeout(self._answer_s)
            done: Done = read_done(answer)
        except (OSError, msgspec.MsgspecError) as error:
            self._popen.kill()
            raise ConnectionLost(f"a worker process does not answer: {error}") from None
        if done.problem:
            raise ConnectionLost(f"a worker process: {done.problem}")

    def _send(self, order: MainOrder, files: Sequence[int]) -> None:
        try:
            socket.send_fds(self._main, [encode(order)], list(files))
        except OSError as error:
            self._popen.kill()
            raise ConnectionLost(f"a worker process has ended: {error}") from None


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    # The same modules as in this process, wherever it found them.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return subprocess.Popen(
        module_command(_PROGRAM, str(descriptor), configured_format()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env={**os.environ, "PYTHONPATH": path},
    )
