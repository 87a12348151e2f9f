"""Mutual TLS with real handshakes over loopback sockets."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from prfaas.errors import InputError
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from prfaas_lab.testing.certificates import CertificateSet, make_certificates
from tests.secret_files import write_secret
from tests.waiting import PATIENCE_S

TIMEOUT_S = PATIENCE_S


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateSet:
    return make_certificates(tmp_path_factory.mktemp("certs"), ["kv1.example.net"])


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CertificateSet:
    return make_certificates(tmp_path_factory.mktemp("foreign"))


class Outcome(NamedTuple):
    client: bytes | Exception  # what the client read
    server: bytes | Exception  # what the server read
    version: str | None


def meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "localhost") -> Outcome:
    """One connection: the client sends "ping", the server answers "pong"."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(TIMEOUT_S)
    received: list[bytes | Exception] = []

    def serve() -> None:
        raw, _ = listener.accept()
        with raw:
            raw.settimeout(TIMEOUT_S)
            try:
                with server.wrap_socket(raw, server_side=True) as connection:
                    received.append(connection.recv(16))
                    connection.sendall(b"pong")
            except OSError as error:
                received.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    version = None
    answer: bytes | Exception
    try:
        with (
            socket.create_connection(listener.getsockname(), TIMEOUT_S) as raw,
            client.wrap_socket(raw, server_hostname=name) as connection,
        ):
            version = connection.version()
            connection.sendall(b"ping")
            answer = connection.recv(16)
    except OSError as error:
        answer = error
    thread.join(TIMEOUT_S)
    listener.close()
    assert not thread.is_alive()
    return Outcome(answer, received[0], version)


def server_of(made: CertificateSet) -> ssl.SSLContext:
    return server_context(made.ca, made.server, made.server_key)


def client_of(made: CertificateSet) -> ssl.SSLContext:
    return client_context(made.ca, made.client, made.client_key)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", SERVICE_NAME, "kv1.example.net"])
def test_members_of_one_ca_connect(certificates: CertificateSet, name: str) -> None:
    met = meet(server_of(certificates), client_of(certificates), name)
    assert met == (b"pong", b"ping", "TLSv1.3")


def refused(outcome: Outcome) -> bool:
    return not isinstance(outcome.client, bytes) and not isinstance(outcome.server, bytes)


def test_a_client_without_a_certificate_is_refused(certificates: CertificateSet) -> None:
    anonymous = ssl.create_default_context(cafile=str(certificates.ca))
    outcome = meet(server_of(certificates), anonymous)
    assert refused(outcome)
    assert "certificate" in str(outcome.server)


def test_a_client_of_another_ca_is_refused(
    certificates: CertificateSet, foreign: CertificateSet
) -> None:
    stranger = client_context(certificates.ca, foreign.client, foreign.client_key)
    outcome = meet(server_of(certificates), stranger)
    assert refused(outcome)
    assert "CERTIFICATE_VERIFY_FAILED" in str(outcome.server)


def test_a_server_of_another_ca_is_refused(
    certificates: CertificateSet, foreign: CertificateSet
) -> None:
    impostor = server_context(certificates.ca, foreign.server, foreign.server_key)
    outcome = meet(impostor, client_of(certificates))
    assert refused(outcome)
    assert isinstance(outcome.client, ssl.SSLCertVerificationError)


def test_a_server_of_another_name_is_refused(certificates: CertificateSet) -> None:
    outcome = meet(server_of(certificates), client_of(certificates), "elsewhere.example.net")
    assert refused(outcome)
    assert isinstance(outcome.client, ssl.SSLCertVerificationError)


def test_a_client_cannot_pose_as_a_server(certificates: CertificateSet) -> None:
    impostor = server_context(certificates.ca, certificates.client, certificates.client_key)
    client = client_of(certificates)
    client.check_hostname = False  # so that only the certificate's purpose is left to object
    assert refused(meet(impostor, client))


@pytest.fixture
def expired(tmp_path: Path) -> CertificateSet:
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=10)
    return make_certificates(tmp_path, days=1, now=long_ago)


def test_an_expired_server_is_refused(expired: CertificateSet) -> None:
    outcome = meet(server_of(expired), client_of(expired))
    assert refused(outcome)
    assert "certificate has expired" in str(outcome.client)


def test_an_expired_client_is_refused(expired: CertificateSet) -> None:
    client = client_of(expired)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # leaves the objection to the server
    outcome = meet(server_of(expired), client)
    assert refused(outcome)
    assert "certificate has expired" in str(outcome.server)


def test_tls_1_2_is_refused(certificates: CertificateSet) -> None:
    old = client_of(certificates)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert refused(meet(server_of(certificates), old))


def test_unencrypted_bytes_are_refused(certificates: CertificateSet) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(TIMEOUT_S)
        theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ssl.SSLError):
            server_of(certificates).wrap_socket(ours, server_side=True)


Context = Callable[[Path, Path, Path], ssl.SSLContext]


@pytest.mark.parametrize("context", [server_context, client_context])
def test_wrong_files_are_named(
    certificates: CertificateSet, tmp_path: Path, context: Context
) -> None:
    made, none = certificates, tmp_path / "none.pem"
    junk = tmp_path / "junk.pem"
    junk.write_text("hello")
    locked = tmp_path / "encrypted.key"
    write_secret(locked, _encrypted(made.server_key))
    for files, expected in (
        ((none, made.server, made.server_key), f"{none}: no such file; check the path"),
        ((made.ca, none, made.server_key), f"{none}: no such file; check the path"),
        ((made.ca, made.server, none), f"{none}: no such file; check the path"),
        ((tmp_path, made.server, made.server_key), f"{tmp_path}: cannot be read: Is a directory"),
        ((junk, made.server, made.server_key), f"{junk}: is not a CA certificate; "),
        ((made.ca, junk, made.server_key), f"{junk}: is not a certificate; "),
        ((made.ca, made.server, junk), f"{junk}: is not a private key; "),
        (
            (made.ca, made.server, made.client_key),
            f"{made.client_key}: does not belong to the certificate {made.server}",
        ),
        ((made.ca, made.server, locked), f"{locked}: is encrypted; "),
    ):
        with pytest.raises(InputError) as raised:
            context(*files)
        assert str(raised.value).startswith(expected)
        assert "\n" not in str(raised.value)


def _encrypted(key: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
