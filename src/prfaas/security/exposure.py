"""Where a service may listen: on loopback, or elsewhere with a key and TLS. Pure."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from prfaas.errors import InputError


class Protection(NamedTuple):
    """What protects a service from strangers."""

    has_key: bool
    has_tls: bool
    insecure: bool = False  # the operator has accepted the risk


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can connect to `host`. A name other than `localhost` is
    not: it may resolve to any address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def refuse_exposure(host: str, protection: Protection, *, where: str, key_flag: str) -> None:
    """Raises InputError when other hosts could reach a service that does not protect itself."""
    if protection.insecure or is_loopback(host):
        return
    missing = []
    flags = []
    if not protection.has_key:
        missing.append("no key")
        flags.append(key_flag)
    if not protection.has_tls:
        missing.append("no TLS")
        flags.append("--tls-ca, --tls-cert and --tls-key")
    if missing:
        raise InputError(
            f"other hosts could reach {host}, and the service has {' and '.join(missing)}",
            where=where,
            fix=f"give {' and '.join(flags)} (`prfaas init` makes the files), listen on "
            "127.0.0.1, or accept the risk with --insecure",
        )
