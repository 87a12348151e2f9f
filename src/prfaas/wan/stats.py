"""A relay's counters: bytes, connections, and how late the relay itself was. Pure.

A relay on a busy machine forwards bytes later than the emulated path would. The path does not cause
that delay, so it is counted separately.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class LatenessCounter:
    """The lateness of events that were due at a certain time."""

    count: int = 0
    total_s: float = 0.0
    peak_s: float = 0.0

    def add(self, late_s: float) -> None:
        late_s = max(0.0, late_s)
        self.count += 1
        self.total_s += late_s
        self.peak_s = max(self.peak_s, late_s)


class RelayStats(msgspec.Struct, frozen=True, tag_field="event", tag="stats"):
    """Counters since the start, except for `connections` and `held_bytes`: current values."""

    connections: int
    accepted: int
    refused: int  # over the limit of connections, or the target did not answer
    to_target_bytes: int
    to_client_bytes: int
    held_bytes: int
    held_peak_bytes: int
    damaged: int  # chunks
    # Writes of queued bytes that were due at a time, without those that waited for a slow receiver.
    forwards: int = 0
    forward_late_s: float = 0.0
    forward_late_peak_s: float = 0.0
    # Wake-ups of the relay's loop by its own timeouts.
    wakeups: int = 0
    wakeup_late_s: float = 0.0
    wakeup_late_peak_s: float = 0.0
