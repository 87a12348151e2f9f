"""From the kvds' reports on their connections to one report per link between clusters. Pure.

A kvd reports per peer address; this module maps each address to its cluster. The report of a link
is the sum over its senders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from prfaas.config import Deployment
from prfaas.contracts.kvd_api import LATE_WINDOW_S
from prfaas.gateway.fleet.member import Member
from prfaas.scheduler.view import LinkId
from prfaas.types import ClusterId, LinkStats

STALLED_S = 2.5  # bytes have waited this long and none has arrived: the link is cut
# A link whose bytes have waited less may have no connection yet: connecting takes round trips.
CONNECTING_S = 0.5
# Kvds are polled twice a second; one that has not answered for longer than this is late.
ANSWERS_WITHIN_S = 0.75


class LinkReports:
    def __init__(self, deployment: Deployment) -> None:
        self._relays = {
            (ClusterId(link.source), ClusterId(link.target)): link.via for link in deployment.links
        }
        self._reported_s: dict[tuple[str, str], float] = {}  # kvd, peer: the latest report's time
        self._stalled_s: dict[LinkId, float] = {}  # links over which no byte passes, since when

    def is_stated(self, link_id: LinkId) -> bool:
        return link_id in self._relays

    def relay(self, link_id: LinkId) -> str | None:
        """Address of the relay through which the link leads, if there is one."""
        return self._relays.get(link_id)

    def collect(self, members: Sequence[Member], now_s: float) -> dict[LinkId, LinkStats]:
        """One report for every link on which a sender has reported since the last call."""
        found: dict[LinkId, list[LinkStats]] = {}
        fresh: set[LinkId] = set()
        reported_s: dict[tuple[str, str], float] = {}
        receivers = _Receivers(members, now_s)
        for sender in members:
            if sender.report is None or not sender.is_kvd_alive(now_s):
                continue  # what a dead sender had to send does not wait for the link any more
            for stats in sender.report.links:
                link_id = self._link(sender, stats.peer, receivers)
                if link_id is None:
                    continue
                key = (sender.kvd_url, stats.peer)
                reported_s[key] = stats.at_s
                if self._reported_s.get(key) != stats.at_s:
                    fresh.add(link_id)
                elif stats.retransmitted_segments:
                    # Counted when this report was new.
                    stats = msgspec.structs.replace(stats, retransmitted_segments=0)
                late_s = receivers.late_s(link_id[1], stats.peer)
                found.setdefault(link_id, []).append(discount(stats, late_s))
        self._reported_s = reported_s
        return {
            link_id: self._without_stalled(link_id, combine(found[link_id], now_s), now_s)
            for link_id in fresh
        }

    def _without_stalled(self, link_id: LinkId, stats: LinkStats, now_s: float) -> LinkStats:
        """Reports no connections when no byte passes. Connections may be open although nothing
        passes: their ends notice much later."""
        if not stats.backlog_bytes or stats.goodput_bps or not stats.waited_s:
            self._stalled_s.pop(link_id, None)
            return stats
        since_s = self._stalled_s.setdefault(link_id, now_s)
        if now_s - since_s < STALLED_S:
            return stats
        return msgspec.structs.replace(stats, connections=0)

    def _link(self, sender: Member, peer: str, receivers: _Receivers) -> LinkId | None:
        for link_id, via in self._relays.items():
            if link_id[0] == sender.cluster and via == peer:
                return link_id
        for member in receivers.at(peer):
            link_id = (sender.cluster, member.cluster)
            return link_id if link_id[0] != link_id[1] and link_id in self._relays else None
        return None


class _Receivers:
    """The members by the addresses under which kvds report about them."""

    def __init__(self, members: Sequence[Member], now_s: float) -> None:
        self._now_s = now_s
        self._at: dict[str, list[Member]] = {}
        self._late_s: dict[ClusterId, float] = {}  # the largest of each cluster
        for member in members:
            if member.report is not None:
                for address in {member.report.data_address, *member.relays}:
                    self._at.setdefault(address, []).append(member)
                late_s = max(self._late_s.get(member.cluster, 0.0), _late_s(member, now_s))
                self._late_s[member.cluster] = late_s

    def at(self, address: str) -> Sequence[Member]:
        return self._at.get(address, ())

    def late_s(self, cluster: ClusterId, address: str) -> float:
        """How late the event loop of the process at `address` was lately; where a relay leads to
        several processes of `cluster`, the largest of their values."""
        here = [m for m in self.at(address) if m.cluster == cluster]
        if not here:
            return self._late_s.get(cluster, 0.0)
        return max(_late_s(member, self._now_s) for member in here)


def combine(stats: Sequence[LinkStats], now_s: float) -> LinkStats:
    """Sums the senders' reports. Clocks of different hosts do not compare, so the sum carries the
    gateway's time. A kvd reconnects when it has something to send, so a link with nothing to send
    counts as up until the next transfer shows otherwise."""
    backlog = sum(s.backlog_bytes for s in stats)
    connections = sum(s.connections for s in stats)
    waited_s = max(s.waited_s for s in stats)
    works = not backlog or waited_s < CONNECTING_S
    return LinkStats(
        peer=stats[0].peer,
        at_s=now_s,
        connections=connections or int(works),
        goodput_bps=sum(s.goodput_bps for s in stats),
        backlog_bytes=backlog,
        in_flight_bytes=sum(s.in_flight_bytes for s in stats),
        waited_s=waited_s,
        late_s=max(s.late_s for s in stats),
        rtt_s=min(_known(s.rtt_s for s in stats), default=None),
        delivery_bps=_delivery_bps(stats),
        retransmitted_segments=_whole(s.retransmitted_segments for s in stats),
        congestion_window_bytes=_whole(s.congestion_window_bytes for s in stats),
    )


def _late_s(receiver: Member, now_s: float) -> float:
    """As the receiver reports or, where it does not answer, as long as it has been silent. A
    receiver that stays silent is dead, and its silence does not explain waiting bytes."""
    reported_s = 0.0 if receiver.report is None else receiver.report.late_s
    silent_s = now_s - receiver.kvd_seen_s - ANSWERS_WITHIN_S
    return max(reported_s, silent_s if silent_s < receiver.timeouts.unresponsive_s else 0.0)


def discount(stats: LinkStats, receiver_late_s: float) -> LinkStats:
    """Subtracts the time in which the receiver could not run: bytes did not wait for the path."""
    if not receiver_late_s:
        return stats
    # A rate that was measured while the receiver was mostly late is the receiver's, not the link's.
    unsure = receiver_late_s > LATE_WINDOW_S / 2
    return msgspec.structs.replace(
        stats,
        waited_s=max(0.0, stats.waited_s - receiver_late_s),
        delivery_bps=None if unsure else stats.delivery_bps,
    )


def _delivery_bps(stats: Sequence[LinkStats]) -> float | None:
    """The link's total rate. Once bytes wait at one sender the link is full, and the goodput of the
    other senders is a part of what it carries."""
    if all(s.delivery_bps is None for s in stats):
        return None
    return sum(s.goodput_bps if s.delivery_bps is None else s.delivery_bps for s in stats)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


def _whole(values: Iterable[int | None]) -> int | None:
    total = _sum(values)
    return None if total is None else int(total)
