"""The same transfers, mutually authenticated."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.errors import TransferFailed
from prfaas.security.certificates import CertificateSet, make_certificates
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener, ListenerOptions
from tests.transport.ends import (
    Owner,
    expect,
    nothing_leaks,
    segments,
    send,
    slow_path_is_measured,
)
from tests.transport.proxy import Proxy
from tests.waiting import PATIENCE_S

CONTENTS = segments(2_000_000, 1, 70_000, 16_384, 300_000)
OPTIONS = LinkOptions(connections=3, frame_bytes=150_000, quantum_bytes=50_000)
IMPATIENT = replace(OPTIONS, open_s=3)  # for transfers that must fail


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
    with nothing_leaks(), Listener(tls=server(made), options=options) as listener:
        for name, context in strangers.items():
            owner = Owner()
            grant = expect(listener, CONTENTS, owner)
            with TransferLink(listener.address, options=IMPATIENT, tls=context) as link:
                with pytest.raises(TransferFailed, match="not opened"):
                    send(link, grant, CONTENTS).done.result(PATIENCE_S)
            assert not owner.over.is_set(), name
            listener.cancel(grant.transfer_id, "over")
        assert listener.stats().received_bytes == 0
