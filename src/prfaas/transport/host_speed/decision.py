"""Chooses between two ways of sending an arena's bytes over TCP, from measured costs. Pure.

`sendfile` makes no copy at the sender, but the kernel handles every page of 4 KiB by itself, at
both ends of a loopback connection. `sendmsg` copies the bytes into large kernel buffers. Which one
costs less CPU time depends on the processor and on the kernel: how fast the processor copies, and
what the kernel does for a page. Receive sizes and socket buffers are not chosen: between 256 KiB
and 4 MiB they made less than a tenth of difference on a Neoverse-N1.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class Way(enum.Enum):
    SENDFILE = "sendfile"
    COPY = "sendmsg"


@dataclass(frozen=True, slots=True)
class Burst:
    """Bytes that were sent without a pause over one loopback connection."""

    nbytes: int
    cpu_s: float  # of the sending and the receiving thread together


@dataclass(frozen=True, slots=True)
class Sending:
    """How this host's channels send bytes that lie in a file."""

    send_files: bool  # with `sendfile`; False: with `sendmsg` from the mapping
    reason: str

    def __str__(self) -> str:
        way = Way.SENDFILE if self.send_files else Way.COPY
        return f"This host sends KV with {way.value}: {self.reason}."


# Fewer bursts than this show nothing: other processes disturbed them, or the time was too short.
MIN_BURSTS = 3
# `sendfile` is preferred when the difference is small. Between two hosts its advantage is larger
# than on loopback, where the receiver pays for the small pages, too.
COPY_MUST_SAVE = 0.2


def choose(bursts: Mapping[Way, Sequence[Burst]]) -> Sending:
    """Compares medians: single bursts are cheap or dear by chance, for example when the kernel
    charges another thread for a part of the work."""
    if any(len(bursts.get(way, ())) < MIN_BURSTS for way in Way):
        return Sending(True, "the measurement had too little time, so the default applies")
    sendfile, copy = (
        statistics.median(burst.cpu_s / (burst.nbytes / 1e9) for burst in bursts[way])
        for way in (Way.SENDFILE, Way.COPY)
    )
    return Sending(
        send_files=copy > sendfile * (1 - COPY_MUST_SAVE),
        reason=f"on loopback sendfile costs {sendfile:.2f} CPU seconds per GB "
        f"and sendmsg costs {copy:.2f}",
    )
