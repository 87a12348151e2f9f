"""One channel on a real socket: what it receives with TLS, and how it sends files."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prfaas.clock import MonotonicClock
from prfaas.errors import ConnectionLost
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from prfaas.transport.channel import TICK_S, Channel
from prfaas_lab.testing.certificates import CertificateSet, make_certificates
from prfaas_lab.testing.clock import FakeClock

SILENCE_S = 10.0
RECORD_BYTES = 16 << 10
# Views that begin and end within records. Together they fit into the socket's buffers, so that a
# test can send everything before it receives.
SIZES = (1, 5_000, 20_000, 16_384, 30_000)
CONTENT = random.Random(3).randbytes(sum(SIZES))


class SlowClock(FakeClock):
    """A tick passes between any two looks at it."""

    def now(self) -> float:
        self.advance(TICK_S)
        return super().now()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertificateSet:
    return make_certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def plain() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            end.settimeout(SILENCE_S)
        yield near, far


@pytest.fixture
def secure(
    made: CertificateSet, plain: tuple[socket.socket, socket.socket]
) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """The client's and the server's end of one TLS connection."""
    near, far = plain
    client = client_context(made.ca, made.client, made.client_key)
    server = server_context(made.ca, made.server, made.server_key)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.wrap_socket, far, server_side=True)
        connected = client.wrap_socket(near, server_hostname=SERVICE_NAME)
        accepting = accepted.result(SILENCE_S)
    with connected, accepting:
        yield connected, accepting


def empty_views() -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in SIZES]


def test_a_fast_tls_frame_arrives_without_a_report(
    secure: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    """However many buffers it has: a report makes the listener answer at once."""
    Channel(secure[0], MonotonicClock(), SILENCE_S).send([memoryview(CONTENT)], len(CONTENT))
    views, reports = empty_views(), list[int]()
    Channel(secure[1], FakeClock(), SILENCE_S).receive(views, len(CONTENT), reports.append)
    assert b"".join(views) == CONTENT
    assert reports == []


def test_a_slow_tls_frame_is_reported_every_tick(
    secure: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    Channel(secure[0], MonotonicClock(), SILENCE_S).send([memoryview(CONTENT)], len(CONTENT))
    views, reports = empty_views(), list[int]()
    Channel(secure[1], SlowClock(), SILENCE_S).receive(views, len(CONTENT), reports.append)
    assert b"".join(views) == CONTENT
    assert reports == sorted(set(reports)) and 0 < reports[0] <= RECORD_BYTES
    assert all(b - a <= RECORD_BYTES for a, b in zip(reports, reports[1:], strict=False))


def test_a_tls_frame_that_trickles_in_ends_at_its_deadline(
    secure: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    Channel(secure[0], MonotonicClock(), SILENCE_S).send([memoryview(CONTENT)], len(CONTENT))
    channel = Channel(secure[1], SlowClock(), SILENCE_S)
    channel.until_s = 3 * TICK_S
    with pytest.raises(ConnectionLost, match="did not arrive in time"):
        channel.receive(empty_views(), len(CONTENT))


def test_a_tls_peer_that_leaves_within_a_frame_is_noticed(
    secure: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    sender = Channel(secure[0], MonotonicClock(), SILENCE_S)
    sender.send([memoryview(CONTENT)[:-1]], len(CONTENT) - 1)
    sender.close()
    with pytest.raises(ConnectionLost, match="closed"):
        Channel(secure[1], MonotonicClock(), SILENCE_S).receive(empty_views(), len(CONTENT))


def test_a_channel_sends_files_unless_it_encrypts_or_the_host_copies_faster(
    plain: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = plain
    assert Channel(near, MonotonicClock(), SILENCE_S).can_send_files
    assert not Channel(near, MonotonicClock(), SILENCE_S, send_files=False).can_send_files


@pytest.mark.parametrize("send_files", [True, False])
def test_a_tls_channel_never_sends_files(
    secure: tuple[ssl.SSLSocket, ssl.SSLSocket], send_files: bool
) -> None:
    channel = Channel(secure[0], MonotonicClock(), SILENCE_S, send_files=send_files)
    assert not channel.can_send_files
