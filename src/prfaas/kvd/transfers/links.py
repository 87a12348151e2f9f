"""The links to other kvds: one per receiver, made when it is first needed, dropped when it has been
idle for a while."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address, parse_address
from prfaas.errors import InputError, TransferFailed
from prfaas.lateness import LateSince, never_late
from prfaas.security.peers import LOOPBACK_ONLY, PeerRules
from prfaas.transport.link import ConnectionBudget, LinkOptions, TransferLink
from prfaas.transport.workers.pool import WorkerPool
from prfaas.types import LinkStats

LINK_IDLE_S = 300.0  # a link that has had no transfer for this long is dropped
MAX_LINKS = 256


@dataclass(slots=True)
class _UsedLink:
    link: TransferLink
    used_s: float


class Links:
    """All links share one budget of connections. Thread-safe; only `close` waits for threads."""

    # limits: what all links of a process share, and what tests replace
    def __init__(
        self,
        options: LinkOptions,
        *,
        tls: Callable[[], ssl.SSLContext] | None,
        budget: ConnectionBudget,
        workers: WorkerPool | None = None,
        peers: PeerRules = LOOPBACK_ONLY,
        late_since: LateSince = never_late,
        clock: Clock | None = None,
        max_links: int = MAX_LINKS,
    ) -> None:
        """`tls` returns the context of the next handshake."""
        self._options = options
        self._peers = peers
        self._tls = tls
        self._budget = budget
        self._workers = workers
        self._late_since = late_since
        self._clock = clock or MonotonicClock()
        self._max_links = max_links
        self._lock = threading.Lock()  # guards the two collections below
        self._links: dict[Address, _UsedLink] = {}
        self._leaving: list[TransferLink] = []  # dropped, their threads are ending
        self.reports: tuple[LinkStats, ...] = ()  # of the latest sample

    def __len__(self) -> int:
        with self._lock:
            return len(self._links)

    def to(self, address: str) -> TransferLink:
        """The link to this receiver. It is not dropped for `LINK_IDLE_S` from now. Raises
        PeerForbidden when KV must not be sent to that host, and TransferFailed when transfers to
        too many receivers are under way."""
        try:
            receiver = parse_address(address, "data_address")
        except InputError as error:
            raise InputError(error.problem, where="grant", fix=error.fix) from None
        self._peers.check(receiver.host, "grant.data_address")
        with self._lock:
            now = self._clock.now()
            used = self._links.get(receiver)
            if used is None:
                if len(self._links) >= self._max_links:
                    self._drop_least_recent()
                link = TransferLink(
                    receiver,
                    options=self._options,
                    tls=self._tls,
                    budget=self._budget,
                    workers=self._workers,
                    clock=self._clock,
                    late_since=self._late_since,
                )
                used = self._links[receiver] = _UsedLink(link, now)
            used.used_s = now
            return used.link

    def sample(self) -> None:
        """Takes a report of each link, and drops idle links. A report covers the time since the
        previous one, so that there is one sampler and many readers."""
        with self._lock:
            now = self._clock.now()
            for receiver, used in list(self._links.items()):
                if used.link.busy:
                    used.used_s = now
                elif now - used.used_s >= LINK_IDLE_S:
                    self._drop(receiver)
            self._leaving = [link for link in self._leaving if not link.ended]
            links = [used.link for used in self._links.values()]
        self.reports = tuple(link.stats() for link in links)

    def close(self) -> None:
        """Fails the transfers of all links and waits for their threads."""
        with self._lock:
            links = [*self._leaving, *(used.link for used in self._links.values())]
            self._links.clear()
            self._leaving.clear()
        for link in links:
            link.stop()
        for link in links:
            link.close()

    def _drop_least_recent(self) -> None:
        """Makes room for a new link; the caller holds the lock."""
        for receiver, _ in sorted(self._links.items(), key=lambda item: item[1].used_s):
            if self._drop(receiver):
                return
        raise TransferFailed(f"transfers to {len(self._links)} receivers are under way")

    def _drop(self, receiver: Address) -> bool:
        """Closes and forgets a link without transfers; the caller holds the lock."""
        link = self._links[receiver].link
        if not link.close_if_idle():
            return False
        del self._links[receiver]
        if not link.ended:
            self._leaving.append(link)
        return True
