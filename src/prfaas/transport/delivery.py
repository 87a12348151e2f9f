"""A link's bytes over time: when they became ready and when they arrived. No sockets, no locks.

This module answers two questions about the path, independent of how much the sender offers:

    How long has the oldest byte waited?    the age of the first byte that has not arrived
    How fast does the link deliver?         bytes that arrived while others were waiting

A link with little to send delivers little. Such a sample does not show the link's capacity (BBR
calls it application-limited). A rate therefore counts only under a *standing backlog*: the oldest
byte has waited longer than the path's round trip plus `GRACE_S`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from prfaas.lateness import LateSince, never_late

# Added to the path's round trip. The receiver holds back an acknowledgement for milliseconds, and a
# frame of 4 MiB takes 0.1 s at 300 Mbit/s. A byte that is this late has waited for other bytes.
GRACE_S = 0.2
# The rate covers the last second. It covers a longer time only where fewer bytes than `LEAST_BYTES`
# arrived in that second.
WINDOW_S = 1.0
LONGEST_WINDOW_S = 8.0
LEAST_SPAN_S = 0.5
LEAST_BYTES = 16 << 10
# Discard a window in which this process could not run for more than half of the time.
MOST_LATE = 0.5
# Time constant of a rising base round trip: a longer route is accepted eventually, and a queue that
# lasts for minutes is not.
BASE_MEMORY_S = 3600.0
# At most what the link delivers in this time is in flight. More would wait in the buffers of a slow
# path, and so would the message that opens the next transfer, until that transfer has failed.
IN_FLIGHT_S = 2.0
LEAST_IN_FLIGHT_BYTES = 2 << 20  # a few small frames, also where the link delivers next to nothing
_RATE_EVERY_S = 0.1  # between two looks at the link's rate
_COALESCED_S = 0.01  # events that are closer together are merged


class DeliveryReport(NamedTuple):
    """`delivery_bps` is None without a standing backlog, and where too few bytes have arrived."""

    total_bytes: int  # since the link began, acknowledged or not
    waited_s: float
    delivery_bps: float | None


class _DeliveryEvent(NamedTuple):
    at_s: float
    total_bytes: int


class Delivery:
    def __init__(self) -> None:
        self.total_bytes = 0
        self._ready_bytes = 0
        # Bytes that have not arrived. `total_bytes` counts from the beginning of the link.
        self._ready: deque[_DeliveryEvent] = deque()
        self._arrived: deque[_DeliveryEvent] = deque()  # during the current standing backlog
        self._base_s: float | None = None
        self._base_at_s = 0.0

    def record_ready(self, nbytes: int, now: float) -> None:
        self._ready_bytes += nbytes
        if self._ready and now - self._ready[-1].at_s < _COALESCED_S:
            self._ready[-1] = self._ready[-1]._replace(total_bytes=self._ready_bytes)
        else:
            self._ready.append(_DeliveryEvent(now, self._ready_bytes))

    def record_arrival(self, nbytes: int, outstanding_bytes: int, now: float) -> None:
        """`outstanding_bytes` were ready and had not arrived before this arrival."""
        self.total_bytes += nbytes
        oldest_s = self._oldest_s(outstanding_bytes)
        if oldest_s is None or now - oldest_s <= (self._base_s or 0.0) + GRACE_S:
            self._arrived.clear()
            return
        event = _DeliveryEvent(now, self.total_bytes)
        if len(self._arrived) > 1 and now - self._arrived[-1].at_s < _COALESCED_S:
            self._arrived[-1] = event
        else:
            self._arrived.append(event)

    def record_round_trip(self, seconds: float, now: float) -> None:
        """The receiver answered after `seconds`. The path's round trip is at most that long."""
        base_s = self._base_s
        if base_s is None or seconds <= base_s:
            self._base_s = seconds
        else:
            elapsed_s = max(0.0, now - self._base_at_s)
            self._base_s = base_s + (seconds - base_s) * -math.expm1(-elapsed_s / BASE_MEMORY_S)
        self._base_at_s = now

    def report(self, outstanding_bytes: int, now: float, late_since: LateSince) -> DeliveryReport:
        oldest_s = self._oldest_s(outstanding_bytes)
        if oldest_s is None:
            return DeliveryReport(self.total_bytes, 0.0, self.rate_bps(now, late_since))
        waited_s = now - oldest_s - (self._base_s or 0.0) - late_since(oldest_s)
        return DeliveryReport(self.total_bytes, max(0.0, waited_s), self.rate_bps(now, late_since))

    def _oldest_s(self, outstanding_bytes: int) -> float | None:
        """When the first byte that has not arrived became ready; None when all have arrived."""
        settled = self._ready_bytes - outstanding_bytes
        while self._ready and self._ready[0].total_bytes <= settled:
            self._ready.popleft()
        return self._ready[0].at_s if self._ready else None

    def rate_bps(self, now: float, late_since: LateSince) -> float | None:
        """How fast the link delivers; None without a standing backlog, and where too few bytes have
        arrived."""
        found = self._arrived
        while len(found) > 2 and (
            now - found[0].at_s > LONGEST_WINDOW_S
            or (
                now - found[1].at_s >= WINDOW_S
                and found[-1].total_bytes - found[1].total_bytes >= LEAST_BYTES
            )
        ):
            found.popleft()
        if not found or now - found[-1].at_s > WINDOW_S:
            found.clear()  # the backlog is gone, or nothing arrives any more
            return None
        # The bytes of the first event arrived before the window began.
        nbytes, span_s = (
            found[-1].total_bytes - found[0].total_bytes,
            found[-1].at_s - found[0].at_s,
        )
        if span_s < LEAST_SPAN_S or nbytes < LEAST_BYTES:
            return None
        if late_since(found[0].at_s) > MOST_LATE * (now - found[0].at_s):
            return None
        return nbytes * 8 / span_s


class InFlightLimit:
    """How many bytes may be sent and not yet acknowledged, at the rate at which they arrive."""

    def __init__(self, most: int) -> None:
        self._most = self._limit = most
        self._adapted_s = -math.inf

    def limit_bytes(self, delivery: Delivery, in_flight_bytes: int, now: float) -> int:
        """The limit stays while the rate is not known and bytes are in flight: nothing arrives, and
        more bytes would only wait as well."""
        if now - self._adapted_s < _RATE_EVERY_S:
            return self._limit
        self._adapted_s = now
        rate_bps = delivery.rate_bps(now, never_late)
        if rate_bps is not None:
            delivered = int(rate_bps / 8 * IN_FLIGHT_S)
            self._limit = min(self._most, max(LEAST_IN_FLIGHT_BYTES, delivered))
        elif not in_flight_bytes:
            self._limit = self._most
        return self._limit
