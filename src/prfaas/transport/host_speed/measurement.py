"""Measures the ways of sending over a loopback connection, for a fifth of a second.

Two threads of this process send and receive. Each of them makes few, long system calls without the
GIL, so that the interpreter hardly matters. `decision.choose` judges CPU time: beside a busy
neighbour it stays nearly the same, whereas the rate does not.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from prfaas.transport.channel import shut_down
from prfaas.transport.host_speed.decision import Burst, Sending, Way, choose

MEASURE_S = 0.2
BURST_BYTES = 4 << 20  # about as large as a frame
# Bursts take turns in the region, so that their bytes are not in a core's own cache.
REGION_BYTES = 8 << 20
_TIMEOUT_S = 1  # of one system call, should the system not run this process
_TIMEVAL = struct.Struct("@ll")


def choose_sending(measure_s: float = MEASURE_S) -> Sending:
    """Measures this host for about `measure_s` and chooses. Call this once, before the process has
    other work. It does not raise: a host that cannot be measured gets the default."""
    try:
        return choose(measure(measure_s))
    except (OSError, RuntimeError) as error:  # RuntimeError: the system has no thread left
        return Sending(True, f"the measurement failed ({error}), so the default applies")


def measure(measure_s: float) -> dict[Way, list[Burst]]:
    """Alternates the ways until the time is over, so that both meet the same neighbours."""
    found: dict[Way, list[Burst]] = {way: [] for way in Way}
    with _loopback() as loopback:
        until_s = time.monotonic() + measure_s
        while True:
            for way in Way:
                if time.monotonic() >= until_s:
                    return found
                found[way].append(loopback.run(way))


class _Loopback:
    """Both ends of one connection, and the memory of each."""

    def __init__(
        self,
        fd: int,
        ends: tuple[socket.socket, socket.socket],
        thread: ThreadPoolExecutor,
    ) -> None:
        self._fd = fd
        populated = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._source = memoryview(mmap.mmap(fd, REGION_BYTES, flags=populated))
        self._target = memoryview(mmap.mmap(-1, REGION_BYTES, flags=populated))
        self._sender, self._receiver = ends
        self._thread = thread
        self._next = 0

    def run(self, way: Way) -> Burst:
        begin = self._next
        self._next = (begin + BURST_BYTES) % REGION_BYTES
        receiving = self._thread.submit(self._receive, begin)
        cpu_s = -time.thread_time()
        self._send(way, begin)
        cpu_s += time.thread_time()
        return Burst(BURST_BYTES, cpu_s + receiving.result())

    def _send(self, way: Way, at: int) -> None:
        end = at + BURST_BYTES
        while at < end:
            if way is Way.SENDFILE:
                at += os.sendfile(self._sender.fileno(), self._fd, at, end - at)
            else:
                at += self._sender.sendmsg([self._source[at:end]])

    def _receive(self, at: int) -> float:
        """Returns the CPU time of this thread."""
        cpu_s = -time.thread_time()
        end = at + BURST_BYTES
        while at < end:
            got = self._receiver.recv_into(self._target[at:end], 0, socket.MSG_WAITALL)
            if got == 0:
                raise ConnectionResetError("the loopback connection was closed")
            at += got
        return cpu_s + time.thread_time()


@contextmanager
def _loopback() -> Iterator[_Loopback]:
    with ExitStack() as stack:
        fd = os.memfd_create("prfaas-host-speed")  # like a kvd's arena
        stack.callback(os.close, fd)
        os.ftruncate(fd, REGION_BYTES)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(_TIMEOUT_S)
        sender = stack.enter_context(
            socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S)
        )
        receiver = stack.enter_context(server.accept()[0])
        for end in (sender, receiver):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(_TIMEOUT_S, 0))
        thread = stack.enter_context(ThreadPoolExecutor(1, "prfaas-host-speed"))
        stack.callback(shut_down, sender)  # a receiver that still waits ends at once
        yield _Loopback(fd, (sender, receiver), thread)
