"""The program of a worker process: `python -m prfaas.transport.workers.worker DESCRIPTOR`.

Its main thread takes connections, arenas and credentials from the kvd, and each connection has a
thread. The worker ends when its kvd does: nothing else holds the other end of its main socket.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from prfaas.clock import MonotonicClock
from prfaas.errors import PrfaasError, WireError
from prfaas.security.tls import client_context, server_context
from prfaas.service.allocator import limit_heap_growth
from prfaas.service.descriptors import raise_descriptor_limit
from prfaas.service.logging import LogFormat, as_format, configure_logging, flush_log
from prfaas.transport.workers.connection import serve_connection
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
    read_main_order,
)

_LOG = logging.getLogger(__name__)
_MAX_DESCRIPTORS = 2  # beside one order


class Worker:
    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self._lock = threading.Lock()  # guards the arenas
        self._arenas: dict[int, tuple[memoryview, int]] = {}
        self._server: ssl.SSLContext | None = None
        self._client: ssl.SSLContext | None = None

    def view(self, arena: int) -> memoryview:
        with self._lock:
            found = self._arenas.get(arena)
        if found is None:
            raise WireError(f"there is no arena {arena}")
        return found[0]

    def fd(self, arena: int) -> int:
        with self._lock:
            found = self._arenas.get(arena)
        if found is None:
            raise WireError(f"there is no arena {arena}")
        return found[1]

    def run(self, main: socket.socket) -> None:
        """Returns when the kvd has ended."""
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(main, PACKET_BYTES, _MAX_DESCRIPTORS)
            except ConnectionError:
                return
            if not packet:
                return
            done = self._carry_out(read_main_order(packet), files)
            if done is not None:
                main.send(encode(done))

    def _carry_out(self, order: MainOrder, files: list[int]) -> Done | None:
        match order:
            case Serve():
                sock, orders = (socket.socket(fileno=fd) for fd in files)
                self._serve(order, sock, orders)
                return None
            case Map(arena, nbytes):
                return self._map(arena, nbytes, files[0])
            case Unmap(arena):
                return self._unmap(arena)
            case UseCredentials():
                try:
                    self._use_credentials(order, files[0])
                except (PrfaasError, OSError) as error:
                    return Done(str(error))
                finally:
                    os.close(files[0])
                return Done()
            case Ping():
                return Done()

    def _serve(self, serve: Serve, sock: socket.socket, orders: socket.socket) -> None:
        context = self._server if serve.tls == "server" else self._client
        thread = threading.Thread(
            target=serve_connection,
            args=(serve, sock, orders, partial(_given, context), self, self._clock),
            name="prfaas-connection",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left: the kvd sees the end of the socket
            sock.close()
            orders.close()

    def _map(self, arena: int, nbytes: int, fd: int) -> Done:
        try:
            mapped = memoryview(mmap.mmap(fd, nbytes))
        except (OSError, ValueError) as error:
            os.close(fd)
            return Done(f"cannot map an arena of {nbytes} bytes: {error}")
        with self._lock:
            self._arenas[arena] = (mapped, fd)
        return Done()

    def _unmap(self, arena: int) -> Done:
        """The kvd has no order under way that uses the arena. The memory is unmapped when the last
        view of it is gone."""
        with self._lock:
            _, fd = self._arenas.pop(arena)
        os.close(fd)
        return Done()

    def _use_credentials(self, order: UseCredentials, fd: int) -> None:
        # `ssl` reads certificates from files only; these have no name and no disk.
        with ExitStack() as stack:
            paths, at = [], 0
            for nbytes in order.sizes:
                copy = os.memfd_create("prfaas-pem", os.MFD_CLOEXEC)
                stack.callback(os.close, copy)
                os.fchmod(copy, 0o600)  # private keys that others may read are refused
                os.write(copy, os.pread(fd, nbytes, at))
                paths.append(Path(f"/proc/self/fd/{copy}"))
                at += nbytes
            ca, cert, key, client_cert, client_key = paths
            server = server_context(ca, cert, key)
            client = client_context(ca, client_cert, client_key)
        self._server, self._client = server, client


def _given(context: ssl.SSLContext | None) -> ssl.SSLContext:
    if context is None:
        raise ssl.SSLError("the worker has no certificates")
    return context


def main(descriptor: int, log_format: LogFormat) -> None:
    # Ctrl-C in a terminal reaches all processes of the kvd's group; the kvd decides when to end,
    # and its signals to read certificates again are not for its workers.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would have KV and keys in it
    limit_heap_growth()
    configure_logging("warning", log_format)
    raise_descriptor_limit()
    with socket.socket(fileno=descriptor) as connection:
        try:
            Worker().run(connection)
        except (msgspec.MsgspecError, OSError, ValueError) as error:
            _LOG.error("a worker ends: %s", error)
    flush_log()
    # Threads of connections may be in the middle of a frame. Nobody waits for that any more.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), as_format(sys.argv[2]))
