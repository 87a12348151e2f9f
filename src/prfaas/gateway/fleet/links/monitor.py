"""State of the links between clusters: the latest reports go to the board, cuts are timed."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from prfaas.clock import Clock
from prfaas.gateway.fleet.links.reports import LinkReports
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.fleet.membership import Membership
from prfaas.scheduler.board import Board
from prfaas.scheduler.view import LinkId
from prfaas.service.logging import with_fields
from prfaas.types import ClusterId

log = logging.getLogger(__name__)


class LinkMonitor:
    def __init__(
        self, reports: LinkReports, members: Membership, board: Board, clock: Clock
    ) -> None:
        self._reports = reports
        self._members = members
        self._board = board
        self._clock = clock
        self._cut_s: dict[LinkId, float] = {}  # links that are cut, and since when
        self.cuts: Counter[LinkId] = Counter()  # how often each link was found cut

    def update(self) -> None:
        """Passes new link reports to the board, and logs links that were cut or restored."""
        now = self._clock.now()
        for link_id, stats in self._reports.collect(self._trusted(now), now).items():
            if self._board.link(link_id) is None:
                continue  # between two PD clusters: no request is handed off over it
            self._board.record_link_report(link_id, stats)
            if (link := self._board.link(link_id)) is not None and link.up:
                if self._cut_s.pop(link_id, None) is not None:
                    log.info("link %s -> %s is restored", *link_id, extra=_fields(link_id, "up"))
            elif link_id not in self._cut_s:
                log.warning("link %s -> %s is cut", *link_id, extra=_fields(link_id, "cut"))
                self._cut_s[link_id] = now
                self.cuts[link_id] += 1

    def _trusted(self, now_s: float) -> list[Member]:
        """Members of the model that usable members serve, whether their engines answer or not. A
        kvd of another model, or without an engine, sends no KV of this deployment: what it reports
        on links is wrong."""
        served = {
            m.compat.model
            for m in self._members
            if m.compat is not None and self._members.is_usable(m, now_s)
        }
        return [m for m in self._members if m.compat is not None and m.compat.model in served]

    def cut_for_s(self, link_id: LinkId) -> float:
        """How long the link has been cut; 0 when it is up."""
        since_s = self._cut_s.get(link_id)
        return 0.0 if since_s is None else self._clock.now() - since_s

    def leads(self, source: ClusterId, target: ClusterId) -> bool:
        """Whether the deployment states a link from one cluster to another one."""
        return source != target and self._reports.is_stated((source, target))

    def relay_between(self, source: Member, target: Member) -> str | None:
        """Address of the relay through which the source's kvd reaches the target's; None: the
        target's kvd is reached directly."""
        if source.cluster == target.cluster:
            return None
        own = target.relay_from(source.cluster)
        return own or self._reports.relay((source.cluster, target.cluster))


def _fields(link_id: LinkId, state: str) -> dict[str, Any]:
    return with_fields(event="link", source=link_id[0], target=link_id[1], state=state)
