"""What became ready for a link and what has reached its receiver, over time. No sockets, no locks.

Two questions are answered here, both about the path and not about the sender's appetite:

    How long has the oldest byte waited?    the age of the first byte that has not arrived
    How fast does the link deliver?         bytes that arrived while others were waiting

A link that is given little delivers little, and that says nothing about what it could carry (BBR
calls such samples application-limited). So a rate counts only under a *standing backlog*: the
oldest byte has waited longer than the path's own round trip and `GRACE_S`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from prfaas.lateness import LateSince

# Beyond the path's own round trip. An acknowledgement is held back by milliseconds, and a frame of
# 4 MiB takes 0.1 s at 300 Mbit/s: a byte that is this late has waited for other bytes.
GRACE_S = 0.2
# The rate is that of the last second, and of longer only where fewer bytes than `LEAST_BYTES` came
# in that second.
WINDOW_S = 1.0
LONGEST_WINDOW_S = 8.0
LEAST_SPAN_S = 0.5
LEAST_BYTES = 16 << 10
# A window of which this process missed more than half says nothing.
MOST_LATE = 0.5
# The base round trip creeps up this slowly, so that a longer route is accepted in time, and a queue
# that stands for minutes is not.
BASE_MEMORY_S = 3600.0
_COALESCED_S = 0.01  # events that are closer together are kept as one


class Delivered(NamedTuple):
    """What one report says. `delivery_bps` is None without a standing backlog, and where too few
    bytes have arrived."""

    total_bytes: int  # since the link's beginning, whether acknowledged or not
    waited_s: float
    delivery_bps: float | None


class _DeliveryEvent(NamedTuple):
    at_s: float
    total_bytes: int


class Delivery:
    def __init__(self) -> None:
        self.total_bytes = 0
        self._ready_bytes = 0
        self._ready: deque[_DeliveryEvent] = (
            deque()
        )  # not arrived yet; bytes counted from the beginning
        self._arrived: deque[_DeliveryEvent] = deque()  # under the present standing backlog
        self._base_s: float | None = None
        self._base_at_s = 0.0

    def became_ready(self, nbytes: int, now: float) -> None:
        self._ready_bytes += nbytes
        if self._ready and now - self._ready[-1].at_s < _COALESCED_S:
            self._ready[-1] = self._ready[-1]._replace(total_bytes=self._ready_bytes)
        else:
            self._ready.append(_DeliveryEvent(now, self._ready_bytes))

    def arrived(self, nbytes: int, outstanding_bytes: int, now: float) -> None:
        """`outstanding_bytes`: what had been ready and had not arrived, before these."""
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

    def answered(self, seconds: float, now: float) -> None:
        """The receiver answered after so long: the path's round trip is at most that."""
        base_s = self._base_s
        if base_s is None or seconds <= base_s:
            self._base_s = seconds
        else:
            elapsed_s = max(0.0, now - self._base_at_s)
            self._base_s = base_s + (seconds - base_s) * -math.expm1(-elapsed_s / BASE_MEMORY_S)
        self._base_at_s = now

    def report(self, outstanding_bytes: int, now: float, late_since: LateSince) -> Delivered:
        oldest_s = self._oldest_s(outstanding_bytes)
        if oldest_s is None:
            return Delivered(self.total_bytes, 0.0, self._rate(now, late_since))
        waited_s = now - oldest_s - (self._base_s or 0.0) - late_since(oldest_s)
        return Delivered(self.total_bytes, max(0.0, waited_s), self._rate(now, late_since))

    def _oldest_s(self, outstanding_bytes: int) -> float | None:
        """When the first byte that has not arrived became ready; None when all have arrived."""
        settled = self._ready_bytes - outstanding_bytes
        while self._ready and self._ready[0].total_bytes <= settled:
            self._ready.popleft()
        return self._ready[0].at_s if self._ready else None

    def _rate(self, now: float, late_since: LateSince) -> float | None:
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
            found.clear()  # the backlog has gone, or nothing passes any more
            return None
        # The bytes of the first event came before the window began.
        nbytes, span_s = (
            found[-1].total_bytes - found[0].total_bytes,
            found[-1].at_s - found[0].at_s,
        )
        if span_s < LEAST_SPAN_S or nbytes < LEAST_BYTES:
            return None
        if late_since(found[0].at_s) > MOST_LATE * (now - found[0].at_s):
            return None
        return nbytes * 8 / span_s
