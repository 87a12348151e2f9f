"""Measures how long a computation on this machine waits for a core.

Every half second a thread computes for `WORK_S` of CPU time and reads the clock. The difference is
the time that the thread waited for a core. The work is the hash of a large buffer, which Python
computes without its global lock, so that the thread does not block others.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean

WORK_S = 0.02  # about what a gateway needs to parse and hash a long prompt
EVERY_S = 0.5
_BUFFER = bytes(256 * 1024)


@dataclass(slots=True)
class CpuProbe:
    late_s: list[float] = field(default_factory=list)

    @property
    def mean_late_s(self) -> float:
        """Mean wait for a core; zero before the first sample."""
        return fmean(self.late_s) if self.late_s else 0.0


@asynccontextmanager
async def probe_cpu() -> AsyncIterator[CpuProbe]:
    """Takes samples until the context ends."""
    probe = CpuProbe()
    sampling = asyncio.create_task(_sample(probe))
    try:
        yield probe
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


async def _sample(probe: CpuProbe) -> None:
    while True:
        probe.late_s.append(await asyncio.to_thread(late_work_s))
        await asyncio.sleep(EVERY_S)


def late_work_s(work_s: float = WORK_S) -> float:
    """Computes for `work_s` of CPU time. Returns the time that the thread waited for a core."""
    began_s, used_s = time.monotonic(), time.thread_time()
    digest = hashlib.sha256()
    while (computed_s := time.thread_time() - used_s) < work_s:
        digest.update(_BUFFER)
    return max(0.0, time.monotonic() - began_s - computed_s)
