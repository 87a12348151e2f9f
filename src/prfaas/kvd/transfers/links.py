"""The links to other kvds: one per receiver, made when it is first needed."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from prfaas.config.address import parse_address
from prfaas.errors import InputError
from prfaas.lateness import LateSince, never_late
from prfaas.security.peers import LOOPBACK_ONLY, PeerRules
from prfaas.transport.link import ConnectionBudget, LinkOptions, TransferLink
from prfaas.types import LinkStats


class Links:
    """All links share one budget of connections."""

    def __init__(
        self,
        options: LinkOptions,
        *,
        tls: Callable[[], ssl.SSLContext] | None,
        budget: ConnectionBudget,
        peers: PeerRules = LOOPBACK_ONLY,
        late_since: LateSince = never_late,
    ) -> None:
        self._options = options
        self._peers = peers
        self._tls = tls
        self._budget = budget
        self._late_since = late_since
        self._links: dict[str, TransferLink] = {}
        self.reports: tuple[LinkStats, ...] = ()  # of the latest sample

    def to(self, address: str) -> TransferLink:
        """Raises PeerForbidden when KV must not be sent to that host."""
        link = self._links.get(address)
        if link is None:
            try:
                host, port = parse_address(address, "data_address")
            except InputError as error:
                raise InputError(error.problem, where="grant", fix=error.fix) from None
            self._peers.check(host, "grant.data_address")
            link = TransferLink(
                (host, port),
                options=self._options,
                tls=self._tls,
                budget=self._budget,
                late_since=self._late_since,
            )
            self._links[address] = link
        return link

    def sample(self) -> None:
        """Takes a report of each link. A report covers the time since the previous one, so that
        there is one sampler and many readers."""
        self.reports = tuple(link.stats() for link in self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
