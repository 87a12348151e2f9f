"""TLS for the data plane and for HTTP: certificates of one CA, which a process may replace while it
runs.

This module reads files and configures `ssl`. `security.certificates` makes certificates; sockets
are opened elsewhere.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.config.tls import TlsSection
from prfaas.errors import InputError
from prfaas.security.secret_file import check_private

# Every host's certificate of `prfaas init` carries this name in addition to its host. A client that
# reaches its peer through a relay or a changing address checks this name (`server_hostname=`). The
# name proves the server's role, which a client certificate of the same CA cannot.
SERVICE_NAME = "kvd.prfaas"

# AES-128-GCM is the cheapest TLS 1.3 suite on a CPU with AES instructions, ChaCha20 on others.
_SUITES = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384"

_FORM = "give a PEM file; `prfaas init DIR` makes a CA and each host's certificate"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One certificate for listening and one for connecting: a CA may issue each for one use
    only."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


@dataclass(frozen=True, slots=True)
class TlsContents:
    """The contents of the files, as they were when they were read."""

    ca: bytes
    cert: bytes
    key: bytes
    client_cert: bytes
    client_key: bytes

    @classmethod
    def read(cls, files: TlsFiles) -> TlsContents:
        paths = (files.ca, files.cert, files.key, files.client_cert, files.client_key)
        for path in paths:
            _check_readable(path)
        return cls(*(path.read_bytes() for path in paths))


class TlsIdentity:
    """The certificates of one process. `reload` reads the files again: new connections use the new
    certificates and the new CA, open connections go on."""

    def __init__(self, files: TlsFiles, server_name: str | None = None) -> None:
        """`server_name`: the name that certificates of HTTP servers must carry, instead of the host
        of their URL."""
        self._files = files
        self.server_name = server_name
        self.reload()

    def files(self) -> Sequence[Path]:
        """All files that `reload` reads."""
        files = self._files
        return (files.ca, files.cert, files.key, files.client_cert, files.client_key)

    def reload(self) -> None:
        """Raises InputError, and keeps everything, when a file is wrong."""
        files = self._files
        server = server_context(files.ca, files.cert, files.key)
        client = client_context(files.ca, files.client_cert, files.client_key)
        public = public_server_context(files.cert, files.key)
        self._contents = TlsContents.read(files)
        self._server, self._client, self._public = server, client, public

    def server(self) -> ssl.SSLContext:
        """For accepting the next connection: it refuses clients without a certificate of the CA."""
        return self._server

    def client(self) -> ssl.SSLContext:
        """For opening the next connection."""
        return self._client

    def contents(self) -> TlsContents:
        """For processes that open and accept connections for this one. Every reload makes a new
        object."""
        return self._contents

    def member_http(self) -> ssl.SSLContext:
        """For an HTTP server that runs across reloads and serves members only: it refuses clients
        without a certificate of the CA."""
        front = server_context(self._files.ca, self._files.cert, self._files.key)
        front.sni_callback = lambda connection, *_: _switch(connection, self._server)
        return front

    def public_http(self) -> ssl.SSLContext:
        """For an HTTP server that runs across reloads and serves clients without certificates."""
        front = public_server_context(self._files.cert, self._files.key)
        front.sni_callback = lambda connection, *_: _switch(connection, self._public)
        return front


def load_identity(section: TlsSection, where: str, folder: Path = Path()) -> TlsIdentity | None:
    """The identity of a service whose section is named `where`; None: it does not use TLS. Paths
    are relative to `folder`."""
    if (section.client_cert is None) != (section.client_key is None):
        raise InputError(
            "only one of the two is set", where=f"{where}.client_cert, client_key", fix="set both"
        )
    if section.ca and section.cert and section.key:
        return TlsIdentity(
            TlsFiles(
                folder / section.ca,
                folder / section.cert,
                folder / section.key,
                folder / (section.client_cert or section.cert),
                folder / (section.client_key or section.key),
            ),
            section.server_name,
        )
    if section != TlsSection():
        raise InputError(
            "mutual TLS needs all three",
            where="--tls-ca, --tls-cert, --tls-key",
            fix="give the missing ones",
        )
    return None


def _switch(connection: Any, current: ssl.SSLContext) -> None:
    """Called after every ClientHello. The handshake goes on with the current certificate and CA; a
    context that is loaded again in place would keep trusting the old CA."""
    connection.context = current


def server_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """For accepting connections: refuses every client without a valid certificate of `ca`.

    In TLS 1.3 a refused client may consider the handshake complete. It detects the refusal at its
    first read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    # Connections are long-lived and never resumed. A session ticket would be unread data at a peer
    # that only writes, and closing a socket with unread data resets the connection. A resumed
    # session would also skip the check of the client's certificate.
    context.num_tickets = 0
    _load_ca(_for_members(context), ca)
    return _load_pair(context, cert, key)


def client_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """For opening connections: checks the server's certificate against `ca` and against the
    `server_hostname` given when wrapping (a host, an address or SERVICE_NAME)."""
    context = _for_members(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    _load_ca(context, ca)
    return _load_pair(context, cert, key)


def public_server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """For clients without a certificate, such as OpenAI's: TLS 1.2 or newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return _load_pair(context, cert, key)


def trust_context(ca: Path) -> ssl.SSLContext:
    """For a client without a certificate: checks the server's certificate against `ca`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_ca(context, ca)
    return context


def _for_members(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Python 3.15 and later can choose TLS 1.3 suites; earlier versions use OpenSSL's order.
    if choose := getattr(context, "set_ciphersuites", None):
        choose(_SUITES)
    return context


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _check_readable(ca)
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError:
        raise InputError("is not a CA certificate", file=ca, fix=_FORM) from None


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> ssl.SSLContext:
    for path in (cert, key):
        _check_readable(path)
    try:
        context.load_cert_chain(cert, key, password=lambda: _no_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"does not belong to the certificate {cert}", file=key) from None
        # OpenSSL reports "PEM lib" for either file. Loading only the certificate shows which file
        # is invalid.
        broken = key if _is_certificate(cert) else cert
        what = "private key" if broken == key else "certificate"
        raise InputError(f"is not a {what}", file=broken, fix=_FORM) from None
    check_private(key)  # now: until here it may have been another file
    return context


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise InputError("no such file", file=path, fix="check the path") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None


def _is_certificate(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        return False
    return True


def _no_password(key: Path) -> str:
    # Without this OpenSSL would ask for a password on the terminal, which a service does not have.
    raise InputError("is encrypted", file=key, fix="give a key without a passphrase")
