"""The TLS section of a service: kvd, node or gateway.

The string below a field is its entry in docs/configuration.md (`make docs`).
"""

from __future__ import annotations

import msgspec


class TlsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS (`prfaas init` makes the files of a deployment). Give `ca`, `cert` and `key`, or none.
    Kvds and nodes also require a certificate of `ca` from each caller."""

    ca: str | None = None
    """CA certificate that issued the certificates of all members; during a change of the CA, both
    of them in one file."""
    cert: str | None = None
    """Certificate of this service."""
    key: str | None = None
    """Private key of `cert`."""
    client_cert: str | None = None
    """Certificate for calls to members, where `cert` may be used for listening only."""
    client_key: str | None = None
    """Private key of `client_cert`."""
    server_name: str | None = None
    """Name that the certificates of members and gateways must carry when this service calls them
    over HTTPS, instead of the host of their URL: `kvd.prfaas` where addresses change, as those of
    pods do. Every certificate of `prfaas init` and `prfaas render` carries that name."""


PATHS = ("ca", "cert", "key", "client_cert", "client_key")  # keys whose value is a path
