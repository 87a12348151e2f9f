"""The peer of our TLS runs: two processes, one connection, and nothing but Python's `ssl` module. A
pair without TLS is the yardstick of our transfers in `bench/quick.py`.

One process sends a region of memory with `send`, the other receives it into its own
region with `recv_into`. Certificates, TLS version, cipher and the kind of memory are those of
`bench/transport.py`. There are no frames, acknowledgements or timeouts. The result is what mutual
TLS costs at least in one Python thread per end.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from _transport_ends import Speed, cpu_s, touched
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from prfaas_lab.testing.certificates import CertificateSet

CHUNK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)  # per call of `send`
TIMEOUT_S = 60.0
_CPU_S = struct.Struct("!d")  # the receiver's answer to a transfer: its own CPU time


class SocketPair:
    """The sending process's end."""

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._sock = sock
        self._source = memoryview(touched(nbytes)[0])
        self._send(CHUNK_BYTES[-1])  # opens the window of the connection

    def run(self) -> dict[int, Speed]:
        """The speed of one transfer with each chunk size."""
        return {nbytes: self._send(nbytes) for nbytes in CHUNK_BYTES}

    def _send(self, chunk_bytes: int) -> Speed:
        source, send = self._source, self._sock.send
        before, started = cpu_s(), time.perf_counter()
        at, size = 0, source.nbytes
        while at < size:
            at += send(source[at : at + chunk_bytes])
        answer = self._sock.recv(_CPU_S.size)
        took_s, sender_cpu_s = time.perf_counter() - started, cpu_s() - before
        (receiver_cpu_s,) = _CPU_S.unpack(answer)
        gigabytes = size / 1e9
        return Speed(gigabytes / took_s, (sender_cpu_s + receiver_cpu_s) / gigabytes)


@contextmanager
def ssl_pair(certificates: CertificateSet, nbytes: int) -> Iterator[SocketPair]:
    """Starts the receiving process and connects to it."""
    tls = client_context(certificates.ca, certificates.client, certificates.client_key)
    with (
        _receiver(certificates, nbytes) as plain,
        tls.wrap_socket(plain, server_hostname=SERVICE_NAME) as sock,
    ):
        sock.settimeout(None)  # with a timeout, Python would poll before every record
        yield SocketPair(sock, nbytes)


@contextmanager
def socket_pair(nbytes: int) -> Iterator[SocketPair]:
    """The same without TLS."""
    with _receiver(None, nbytes) as sock:
        sock.settimeout(None)
        yield SocketPair(sock, nbytes)


@contextmanager
def _receiver(certificates: CertificateSet | None, nbytes: int) -> Iterator[socket.socket]:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_receive, args=(far, certificates, nbytes), daemon=True)
    process.start()
    try:
        assert near.poll(TIMEOUT_S), "the receiver of the pair of sockets did not start"
        with socket.create_connection(near.recv(), timeout=TIMEOUT_S) as plain:
            yield plain
        process.join(TIMEOUT_S)
    finally:
        process.kill()


def _receive(pipe: Connection, certificates: CertificateSet | None, nbytes: int) -> None:
    """Receives the whole region again and again, until the sender closes the connection."""
    target = memoryview(touched(nbytes)[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        pipe.send(server.getsockname())
        plain, _ = server.accept()
    with plain, _secured(plain, certificates) as sock:
        sock.settimeout(None)
        receive_into = sock.recv_into
        while True:
            before = cpu_s()
            at = 0
            while at < nbytes:
                got = receive_into(target[at:])
                if got == 0:
                    return
                at += got
            sock.send(_CPU_S.pack(cpu_s() - before))


def _secured(plain: socket.socket, certificates: CertificateSet | None) -> socket.socket:
    if certificates is None:
        return plain
    tls = server_context(certificates.ca, certificates.server, certificates.server_key)
    return tls.wrap_socket(plain, server_side=True)
