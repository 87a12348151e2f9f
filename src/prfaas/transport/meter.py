"""A link's state as its sender measures it: TCP_INFO of each connection, and the bytes delivered.
The scheduler derives the verdict (clear, building, congested).

Rates count the bytes that the receiver reports as arrived. The kernel's delivery rate covers only
the first hop: in front of a relay or a proxy it does not describe the path.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from prfaas.errors import ConnectionLost
from prfaas.lateness import LateSince
from prfaas.transport.delivery import DeliveryReport
from prfaas.types import LinkStats

# struct tcp_info of Linux, up to `tcpi_dsack_dups`: 8 bytes of small fields, 24 u32, and then the
# fields that later kernels added.
_TCP_INFO = struct.Struct("=8B24I4Q6I4Q2I2QI")
_LEAST_BYTES = struct.calcsize("=8B24I")  # what every kernel returns
_SND_MSS, _RTT_US, _CWND, _TOTAL_RETRANS = 8 + 2, 8 + 15, 8 + 18, 8 + 23
_DSACK_DUPS = 8 + 24 + 4 + 6 + 4 + 2 + 2


class HasOptions(Protocol):
    """A connection whose socket options can be read: a `Channel` or a `WorkerChannel`."""

    def option(self, level: int, name: int, nbytes: int) -> bytes: ...


class TcpInfo(NamedTuple):
    rtt_s: float
    retransmitted_segments: int  # since the connection began, without needless ones
    congestion_window_bytes: int


def tcp_info(channel: HasOptions) -> TcpInfo | None:
    """None where the platform does not report it, or the connection is gone."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        raw = channel.option(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except ConnectionLost:
        return None
    if len(raw) < _LEAST_BYTES:
        return None
    fields = _TCP_INFO.unpack(raw.ljust(_TCP_INFO.size, b"\0"))
    # A busy host acknowledges late, and its peer then resends segments that had arrived. The
    # receiver reports those (D-SACK). They are not losses of the path, so they are subtracted.
    return TcpInfo(
        rtt_s=fields[_RTT_US] / 1e6,
        retransmitted_segments=max(0, fields[_TOTAL_RETRANS] - fields[_DSACK_DUPS]),
        congestion_window_bytes=fields[_CWND] * fields[_SND_MSS],
    )


class Meter:
    """Turns counters into rates, from one report to the next."""

    def __init__(self, peer: str, now: float) -> None:
        self._peer = peer
        self._at_s = now
        self._delivered_bytes = 0
        self._retransmitted: dict[int, int] = {}  # segments per connection, by id

    def report(
        self,
        now: float,
        connections: Iterable[HasOptions],
        *,
        delivery: DeliveryReport,
        backlog_bytes: int,
        in_flight_bytes: int,
        late_since: LateSince,
    ) -> LinkStats:
        """`backlog_bytes` includes the bytes in flight."""
        elapsed = max(now - self._at_s, 1e-6)
        goodput_bps = (delivery.total_bytes - self._delivered_bytes) * 8 / elapsed
        late_s = late_since(self._at_s)
        self._at_s, self._delivered_bytes = now, delivery.total_bytes
        open_now = list(connections)
        infos = {id(channel): info for channel in open_now if (info := tcp_info(channel))}
        retransmitted = None
        if infos:
            # A resent segment may turn out later to have been needless, so the count can fall.
            retransmitted = sum(
                max(0, info.retransmitted_segments - self._retransmitted.get(key, 0))
                for key, info in infos.items()
            )
        self._retransmitted = {key: info.retransmitted_segments for key, info in infos.items()}
        return LinkStats(
            peer=self._peer,
            at_s=now,
            connections=len(open_now),
            goodput_bps=goodput_bps,
            backlog_bytes=backlog_bytes,
            in_flight_bytes=in_flight_bytes,
            waited_s=delivery.waited_s,
            late_s=late_s,
            rtt_s=min((i.rtt_s for i in infos.values()), default=None),
            delivery_bps=delivery.delivery_bps,
            retransmitted_segments=retransmitted,
            congestion_window_bytes=(
                sum(i.congestion_window_bytes for i in infos.values()) if infos else None
            ),
        )
