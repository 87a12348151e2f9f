"""TLS contexts for the data plane: both sides show a certificate of the same CA, TLS 1.3 only.

Knows files and `ssl`; makes no certificates (`transport.certs` does) and opens no socket.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from prfaas.errors import InputError

# Every server certificate of `prfaas certs` carries this name beside its hosts. A client that
# reaches its peer through a relay or a changing address checks this one (`server_hostname=`): it
# proves the role, which a client certificate of the same CA cannot.
SERVICE_NAME = "kvd.prfaas"

# AES-128-GCM is the cheapest of the TLS 1.3 suites where the CPU has AES instructions, ChaCha20
# where it has not.
_SUITES = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384"

_FORM = "give a PEM file; `prfaas certs DIR` makes a test set"


def server_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """For accepting: refuses every client without a valid certificate of `ca`.

    In TLS 1.3 a refused client may believe the handshake done: it learns of the refusal at its
    first read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    # Connections live long and are never resumed. A ticket is unread data at a peer that only
    # writes, and closing a socket with unread data resets it.
    context.num_tickets = 0
    return _loaded(context, ca, cert, key)


def client_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """For connecting: checks the server's certificate against `ca` and against the
    `server_hostname` given when wrapping (a host, an address or SERVICE_NAME)."""
    return _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ca, cert, key)


def _loaded(context: ssl.SSLContext, ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Suites of TLS 1.3 can be chosen from Python 3.15 on; before, OpenSSL's order stands.
    if choose := getattr(context, "set_ciphersuites", None):
        choose(_SUITES)
    for path in (ca, cert, key):
        _check_readable(path)
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError:
        raise InputError("not a CA certificate", file=ca, fix=_FORM) from None
    try:
        context.load_cert_chain(cert, key, password=lambda: _no_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(
                f"this key does not belong to the certificate {cert}", file=key
            ) from None
        # OpenSSL says "PEM lib" of both files alike; the certificate alone tells which it was.
        broken = key if _is_certificate(cert) else cert
        what = "private key" if broken == key else "certificate"
        raise InputError(f"not a {what}", file=broken, fix=_FORM) from None
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
    # Without this OpenSSL would ask on the terminal, where a service has nobody to answer.
    raise InputError("the key is encrypted", file=key, fix="give one without a passphrase")
