"""How a link is doing, from its sender's side: TCP_INFO of each connection, and what was
acknowledged. The verdict (clear, building, congested) is the scheduler's.

Rates are of what the receiver has acknowledged. The kernel's own delivery rate is of the first hop:
in front of a relay or a proxy it says nothing of the path.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

from prfaas.errors import ConnectionLost
from prfaas.transport.channel import Channel
from prfaas.types import LinkStats

# struct tcp_info of Linux: 8 bytes of small fields, then 24 u32.
_TCP_INFO = struct.Struct("=8B24I")
_SND_MSS, _RTT_US, _CWND, _TOTAL_RETRANS = 8 + 2, 8 + 15, 8 + 18, 8 + 23
# A rate needs so much time in which there was a backlog: in less the first acknowledgement may have
# had no chance to come.
LEAST_BUSY_S = 0.2


class TcpInfo(NamedTuple):
    rtt_s: float
    retransmitted_segments: int  # since the connection began
    congestion_window_bytes: int


def tcp_info(channel: Channel) -> TcpInfo | None:
    """None where the platform does not tell, or the connection is gone."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        raw = channel.option(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except ConnectionLost:
        return None
    if len(raw) < _TCP_INFO.size:
        return None
    fields = _TCP_INFO.unpack(raw)
    return TcpInfo(
        rtt_s=fields[_RTT_US] / 1e6,
        retransmitted_segments=fields[_TOTAL_RETRANS],
        congestion_window_bytes=fields[_CWND] * fields[_SND_MSS],
    )


class _Passed(NamedTuple):
    nbytes: int
    busy_s: float

    @property
    def bps(self) -> float:
        return self.nbytes * 8 / self.busy_s

    def and_then(self, more: _Passed) -> _Passed:
        return _Passed(self.nbytes + more.nbytes, self.busy_s + more.busy_s)


class Meter:
    """Turns counters into rates, from one report to the next."""

    def __init__(self, peer: str, now: float) -> None:
        self._peer = peer
        self._at_s = now
        self._acknowledged_bytes = 0
        self._busy_s = 0.0
        self._passed = _Passed(0, 0.0)  # in the last reports that make up LEAST_BUSY_S
        self._retransmitted: dict[int, int] = {}  # per connection, by id

    def report(
        self,
        now: float,
        connections: Iterable[Channel],
        *,
        acknowledged_bytes: int,
        backlog_bytes: int,
        in_flight_bytes: int,
        busy_s: float,
    ) -> LinkStats:
        """`acknowledged_bytes` and `busy_s` count from the link's beginning, `backlog_bytes`
        includes what is in flight."""
        elapsed = max(now - self._at_s, 1e-6)
        passed = _Passed(acknowledged_bytes - self._acknowledged_bytes, busy_s - self._busy_s)
        goodput_bps = passed.nbytes * 8 / elapsed
        self._at_s, self._acknowledged_bytes, self._busy_s = now, acknowledged_bytes, busy_s
        busy = passed.busy_s >= LEAST_BUSY_S
        # A transfer that has just begun has no rate of its own: that of the time before counts too.
        self._passed = passed if busy else self._passed.and_then(passed)
        open_now = list(connections)
        infos = {id(channel): info for channel in open_now if (info := tcp_info(channel))}
        retransmitted = None
        if infos:
            retransmitted = sum(
                info.retransmitted_segments - self._retransmitted.get(key, 0)
                for key, info in infos.items()
            )
        self._retransmitted = {key: info.retransmitted_segments for key, info in infos.items()}
        drain_s: float | None = 0.0
        if backlog_bytes and self._passed.busy_s >= LEAST_BUSY_S:
            drain_s = backlog_bytes * 8 / self._passed.bps if self._passed.nbytes else None
        return LinkStats(
            peer=self._peer,
            at_s=now,
            connections=len(open_now),
            goodput_bps=goodput_bps,
            backlog_bytes=backlog_bytes,
            in_flight_bytes=in_flight_bytes,
            drain_s=drain_s,
            rtt_s=min((i.rtt_s for i in infos.values()), default=None),
            delivery_bps=passed.bps if busy else None,
            retransmitted_segments=retransmitted,
            congestion_window_bytes=(
                sum(i.congestion_window_bytes for i in infos.values()) if infos else None
            ),
        )
