"""The same transfers, mutually authenticated."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.errors import ConnectionLost, TransferFailed
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from prfaas.transport.channel import connect
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas_lab.testing.certificates import CertificateSet, make_certificates
from tests.transport.ends import (
    Owner,
    expect,
    nothing_leaks,
    segments,
    send,
    slow_path_is_measured,
)
from tests.transport.proxy import Proxy
from tests.waiting import PATIENCE_S, wait_until

CONTENTS = segments(2_000_000, 1, 70_000, 16_384, 300_000)
OPTIONS = LinkOptions(connections=3, frame_bytes=150_000, quantum_bytes=50_000)
IMPATIENT = replace(OPTIONS, open_s=1.5)  # for transfers that must fail


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertificateSet:
    return make_certificates(tmp_path_factory.mktemp("certs"))


def server(made: CertificateSet) -> Callable[[], ssl.SSLContext]:
    context = server_context(made.ca, made.server, made.server_key)
    return lambda: context


def client(made: CertificateSet) -> Callable[[], ssl.SSLContext]:
    context = client_context(made.ca, made.client, made.client_key)
    return lambda: context


def test_a_slow_path_is_measured_before_a_frame_has_arrived(made: CertificateSet) -> None:
    options = LinkOptions(connections=1, tls_name=SERVICE_NAME)
    with Listener(tls=server(made)) as listener:
        slow_path_is_measured(listener, options, client(made))


@pytest.mark.parametrize("cut", [1 << 30, 5000])
def test_bytes_arrive_as_they_were(made: CertificateSet, cut: int) -> None:
    owner = Owner(cut=cut)
    with nothing_leaks(), Listener(tls=server(made)) as listener:
        with TransferLink(listener.address, options=OPTIONS, tls=client(made)) as link:
            send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
        assert owner.wait() is None
        assert owner.memory == CONTENTS


def test_cut_connections_are_resumed(made: CertificateSet) -> None:
    def forward(number: int, seen: int, data: bytes) -> bytes | None:
        return None if number < 4 and seen > 300_000 else data

    owner = Owner()
    with nothing_leaks(), Listener(tls=server(made)) as listener:
        with Proxy(listener.address, forward=forward) as proxy:
            with TransferLink(proxy.address, options=OPTIONS, tls=client(made)) as link:
                send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
        assert owner.memory == CONTENTS


class Current:
    """A context that can be replaced, as when certificates are read again."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.asked = 0

    def __call__(self) -> ssl.SSLContext:
        self.asked += 1
        return self.context


def test_new_certificates_count_for_new_connections_and_old_ones_stay(
    made: CertificateSet, tmp_path: Path
) -> None:
    renewed = make_certificates(tmp_path)  # of another CA
    serving, sending = Current(server(made)()), Current(client(made)())
    first, *others = CONTENTS
    owner = Owner()
    options = replace(OPTIONS, connections=1)
    with nothing_leaks(), Listener(tls=serving) as listener:
        with TransferLink(listener.address, options=options, tls=sending) as link:
            sizes = {name: len(content) for name, content in CONTENTS.items()}
            transfer = link.open(expect(listener, CONTENTS, owner), sizes)
            transfer.ready(first, memoryview(CONTENTS[first]))
            wait_until(lambda: transfer.acknowledged_bytes > 0)
            serving.context, sending.context = server(renewed)(), client(renewed)()
            for name in others:
                transfer.ready(name, memoryview(CONTENTS[name]))
            transfer.done.result(PATIENCE_S)
            assert owner.memory == CONTENTS
            assert serving.asked == sending.asked == 1, "the connection was not made again"
        for tls, served in ((sending, True), (client(made), False)):
            grant = expect(listener, CONTENTS, Owner())
            limits = OPTIONS if served else IMPATIENT
            with TransferLink(listener.address, options=limits, tls=tls) as link:
                error = send(link, grant, CONTENTS).done.exception(PATIENCE_S)
            assert (error is None) == served, error


def test_the_whole_handshake_of_a_link_has_one_timeout(made: CertificateSet) -> None:
    """The peer sends a handshake record byte by byte and never completes it."""
    over = threading.Event()

    def trickle(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            for byte in b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc" + bytes(10_000):
                if over.wait(0.02):
                    return
                try:
                    peer.send(bytes([byte]))
                except OSError:
                    return

    with nothing_leaks(), socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=(listening,), daemon=True)
        thread.start()
        try:
            with pytest.raises(ConnectionLost, match="no TLS handshake within 0.5 s"):
                connect(listening.getsockname(), timeout_s=0.5, tls=client(made)())
        finally:
            over.set()
            thread.join(PATIENCE_S)


def test_the_name_in_the_certificate_counts(made: CertificateSet) -> None:
    """Through a relay the address is the relay's: the service's own name is checked instead."""
    with nothing_leaks(), Listener(tls=server(made)) as listener:
        for name, served in ((SERVICE_NAME, True), ("another.name", False)):
            owner = Owner()
            grant = expect(listener, CONTENTS, owner)
            options = replace(OPTIONS if served else IMPATIENT, tls_name=name)
            with TransferLink(listener.address, options=options, tls=client(made)) as link:
                transfer = send(link, grant, CONTENTS)
                if served:
                    transfer.done.result(PATIENCE_S)
                else:
                    with pytest.raises(TransferFailed, match="not opened.*CERTIFICATE"):
                        transfer.done.result(PATIENCE_S)
            listener.cancel(grant.transfer_id, "over")


def test_a_certificate_of_another_ca_is_refused(made: CertificateSet, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)
    strangers = {
        "plain TCP": None,
        "another CA's client": lambda: client_context(made.ca, other.client, other.client_key),
        "a client that trusts another CA": client(other),
    }
    options = ListenerOptions(unproven_s=1)
    owners = {name: Owner() for name in strangers}
    with nothing_leaks(), Listener(tls=server(made), options=options) as listener:
        with ExitStack() as stack:  # the links wait for their limits at the same time
            sent = {}
            for name, context in strangers.items():
                link = TransferLink(listener.address, options=IMPATIENT, tls=context)
                stack.enter_context(link)
                sent[name] = send(link, expect(listener, CONTENTS, owners[name]), CONTENTS)
            for name, transfer in sent.items():
                with pytest.raises(TransferFailed, match="not opened"):
                    transfer.done.result(PATIENCE_S)
                assert not owners[name].over.is_set(), name
        assert listener.stats().received_bytes == 0
