"""TLS contexts for the data plane: both sides present a certificate of one CA, TLS 1.3 only.

This module reads files and configures `ssl`. `security.certificates` makes certificates; sockets
are opened elsewhere.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from prfaas.errors import InputError

# Every server certificate of `prfaas certs` carries this name in addition to its hosts. A client
# that reaches its peer through a relay or a changing address checks this name
# (`server_hostname=`). The name proves the server's role, which a client certificate of the same
# CA cannot.
SERVICE_NAME = "kvd.prfaas"

# AES-128-GCM is the cheapest TLS 1.3 suite on a CPU with AES instructions, ChaCha20 on others.
_SUITES = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384"

_FORM = "give a PEM file; `prfaas certs DIR` makes a test set"


def server_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """For accepting connections: refuses every client without a valid certificate of `ca`.

    In TLS 1.3 a refused client may consider the handshake complete. It detects the refusal at its
    first read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    # Connections are long-lived and never resumed. A session ticket would be unread data at a peer
    # that only writes, and closing a socket with unread data resets the connection.
    context.num_tickets = 0
    return _load(context, ca, cert, key)


def client_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """For opening connections: checks the server's certificate against `ca` and against the
    `server_hostname` given when wrapping (a host, an address or SERVICE_NAME)."""
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ca, cert, key)


def _load(context: ssl.SSLContext, ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Python 3.15 and later can choose TLS 1.3 suites; earlier versions use OpenSSL's order.
    if choose := getattr(context, "set_ciphersuites", None):
        choose(_SUITES)
    for path in (ca, cert, key):
        _check_readable(path)
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError:
        raise InputError("is not a CA certificate", file=ca, fix=_FORM) from None
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
