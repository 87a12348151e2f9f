"""The hosts that a kvd may exchange KV with. Pure: names are compared, not resolved."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

from prfaas.errors import InputError, PeerForbidden
from prfaas.security.exposure import is_loopback

_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class PeerRules:
    """`allowed` has host names, addresses and networks. When it is empty, every host is allowed
    where a credential protects the requests (`trusted`), and only this host otherwise."""

    def __init__(self, allowed: Sequence[str] = (), *, trusted: bool) -> None:
        self._everywhere = trusted and not allowed
        self._names: set[str] = set()
        self._networks: list[_Network] = []
        for entry in allowed:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if not is_host_name(entry):
                    raise InputError(
                        f"{entry!r} is not a host name, an address or a network",
                        where="kvd.peers",
                        fix="write entries like kv1.example.net, 10.0.0.7 or 10.0.0.0/16",
                    ) from None
                self._names.add(entry.lower())

    def check(self, host: str, where: str) -> None:
        """Raises PeerForbidden when KV must not be sent to or requested from `host`."""
        if self._everywhere or is_loopback(host) or host.lower() in self._names:
            return
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            address = None
        if address is not None and any(
            address in network for network in self._networks if network.version == address.version
        ):
            return
        raise PeerForbidden(
            f"{host} is not an allowed peer of this kvd",
            where=where,
            fix="give the kvd a member key, or list the host in kvd.peers",
        )


LOOPBACK_ONLY = PeerRules(trusted=False)


def is_host_name(text: str) -> bool:
    """Labels as DNS allows them: at most 63 characters each, 253 in all."""
    labels = text.removesuffix(".").split(".")
    return len(text) <= 253 and all(
        1 <= len(label) <= 63
        and label.isascii()
        and all(c.isalnum() or c in "-_" for c in label)
        and not label.startswith("-")
        and not label.endswith("-")
        for label in labels
    )
