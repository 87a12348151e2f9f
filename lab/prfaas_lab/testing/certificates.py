"""Certificates for tests and benchmarks: a CA, a server and a client in one folder."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from prfaas.security.certificates import CertificateAuthority
from prfaas.security.tls import TlsFiles, TlsIdentity


class CertificateSet(NamedTuple):
    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    def identity(self) -> TlsIdentity:
        """Of one process that both listens and connects."""
        return TlsIdentity(
            TlsFiles(self.ca, self.server, self.server_key, self.client, self.client_key)
        )


def make_certificates(
    folder: Path,
    hosts: Sequence[str] = (),
    *,
    days: int = 365,
    now: datetime.datetime | None = None,
) -> CertificateSet:
    """A new CA, a certificate for the server of `hosts` (loopback is always among them) and one for
    a client. A set that is in the folder is replaced."""
    authority = CertificateAuthority.new(now)
    server = authority.issue("localhost", days, now, hosts)
    client = authority.issue_client("client", days, now)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    made = CertificateSet(*(folder / name for name in names))
    contents = (authority.pem, server.pem, server.key_pem, client.pem, client.key_pem)
    for path, content in zip(made, contents, strict=True):
        path.touch()
        path.chmod(0o600)
        path.write_bytes(content)
    return made
