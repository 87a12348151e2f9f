from __future__ import annotations

import contextlib
import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from prfaas.errors import InputError
from prfaas.security.certificates import CA_DAYS, CertificateAuthority, IssuedCertificate
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from tests.secret_files import write_secret


@pytest.mark.parametrize("host", ["", "a b", "http://kv1", "kv1:7000", "köln.example"])
def test_a_bad_host_is_named(host: str) -> None:
    with pytest.raises(InputError, match=f"'{host}' is not a host name or IP address"):
        CertificateAuthority.new().issue(host, 1)


def accepts(tmp_path: Path, ca: bytes, issued: IssuedCertificate, name: str) -> bool:
    """Whether a client that trusts `ca` accepts the certificate of a server for `name`, and the
    server accepts the same certificate as that of the client."""
    files = [tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"]
    for file, content in zip(files, (ca, issued.pem, issued.key_pem), strict=True):
        write_secret(file, content)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context(*files).wrap_bio(to_server, to_client, server_side=True)
    client = client_context(*files).wrap_bio(to_client, to_server, server_hostname=name)
    try:
        for _ in range(3):
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLError:
        return False
    return True


def test_a_hosts_certificate_is_for_that_host_only(tmp_path: Path) -> None:
    authority = CertificateAuthority.new()
    for host in ("10.0.0.1", "fd00::1", "kv1.example.net"):
        issued = authority.issue(host, 1)
        for name in (host, "localhost", "127.0.0.1", "::1", SERVICE_NAME):
            assert accepts(tmp_path, authority.pem, issued, name), name
        for name in ("10.0.0.2", "fd00::2", "kv2.example.net"):
            assert not accepts(tmp_path, authority.pem, issued, name), name
    other = CertificateAuthority.new()
    assert not accepts(tmp_path, other.pem, authority.issue("10.0.0.1", 1), "10.0.0.1")


def test_a_clients_certificate_is_not_that_of_a_server(tmp_path: Path) -> None:
    authority = CertificateAuthority.new()
    issued = authority.issue_client("operator", 1)
    for name in ("localhost", SERVICE_NAME, "operator"):
        assert not accepts(tmp_path, authority.pem, issued, name)


def test_a_kept_ca_issues_certificates_of_the_same_deployment(tmp_path: Path) -> None:
    authority = CertificateAuthority.new()
    again = CertificateAuthority.parse(authority.pem, authority.key_pem)
    assert accepts(tmp_path, authority.pem, again.issue("10.0.0.9", 1), "10.0.0.9")
    other = CertificateAuthority.new()
    with pytest.raises(InputError, match="the CA's key does not belong to its certificate"):
        CertificateAuthority.parse(authority.pem, other.key_pem)
    with pytest.raises(InputError, match="is not a PEM file"):
        CertificateAuthority.parse(authority.pem, b"nothing")


def test_a_certificate_does_not_outlive_its_ca() -> None:
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=CA_DAYS - 10)
    authority = CertificateAuthority.new(long_ago)
    issued = x509.load_pem_x509_certificate(authority.issue("h", 365).pem)
    ca = x509.load_pem_x509_certificate(authority.pem)
    assert issued.not_valid_after_utc == ca.not_valid_after_utc
