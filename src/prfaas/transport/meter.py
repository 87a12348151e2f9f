"""How a link is doing, from its sender's side: TCP_INFO of each connection, and what was
acknowledged. The verdict (clear, building, congested) is the scheduler's."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

from prfaas.errors import ConnectionLost
from prfaas.transport.channel import Channel
from prfaas.types import LinkStats

# struct tcp_info of Linux: 8 bytes of small fields, 24 u32, 4 u64, 6 u32, then delivery_rate (u64).
_TCP_INFO = struct.Struct("=8B24I4Q6IQ")
_SND_MSS, _RTT_US, _CWND, _TOTAL_RETRANS = 8 + 2, 8 + 15, 8 + 18, 8 + 23
_DELIVERY_RATE = 8 + 24 + 4 + 6


class TcpInfo(NamedTuple):
    rtt_s: float
    retransmitted_segments: int  # since the connection began
    congestion_window_bytes: int
    delivery_bps: float


def tcp_info(channel: Channel) -> TcpInfo | None:
    """None where the platform does not tell, or the connection is gone."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        raw = channel.option(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except ConnectionLost:
        return None
    if len(raw) < _TCP_INFO.size:
        return None  # a kernel older than delivery_rate (4.9)
    fields = _TCP_INFO.unpack(raw)
    return TcpInfo(
        rtt_s=fields[_RTT_US] / 1e6,
        retransmitted_segments=fields[_TOTAL_RETRANS],
        congestion_window_bytes=fields[_CWND] * fields[_SND_MSS],
        delivery_bps=fields[_DELIVERY_RATE] * 8,
    )


class Meter:
    """Turns counters into rates, from one report to the next."""

    def __init__(self, peer: str, now: float) -> None:
        self._peer = peer
        self._at_s = now
        self._acknowledged_bytes = 0
        self._retransmitted: dict[int, int] = {}  # per connection, by id

    def report(
        self,
        now: float,
        connections: Iterable[Channel],
        *,
        acknowledged_bytes: int,
        backlog_bytes: int,
        in_flight_bytes: int,
    ) -> LinkStats:
        """`acknowledged_bytes` counts from the link's beginning, `backlog_bytes` includes what is
        in flight."""
        elapsed = max(now - self._at_s, 1e-6)
        goodput_bps = (acknowledged_bytes - self._acknowledged_bytes) * 8 / elapsed
        self._at_s, self._acknowledged_bytes = now, acknowledged_bytes
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
        if backlog_bytes:
            drain_s = backlog_bytes * 8 / goodput_bps if goodput_bps else None
        return LinkStats(
            peer=self._peer,
            at_s=now,
            connections=len(open_now),
            goodput_bps=goodput_bps,
            backlog_bytes=backlog_bytes,
            in_flight_bytes=in_flight_bytes,
            drain_s=drain_s,
            rtt_s=min((i.rtt_s for i in infos.values()), default=None),
            delivery_bps=sum(i.delivery_bps for i in infos.values()) if infos else None,
            retransmitted_segments=retransmitted,
            congestion_window_bytes=(
                sum(i.congestion_window_bytes for i in infos.values()) if infos else None
            ),
        )
