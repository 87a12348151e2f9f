"""Python runs this before anything else in processes that have its folder on their path: their wall
clock is then off by as many seconds as the file beside it says, from one moment to the next.

Monotonic clocks stay as they are, as they do when somebody sets a machine's clock.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

_FILE = Path(__file__).with_name("shift")


def _shifted(clock: Callable[[], float], unit: float) -> Callable[[], float]:
    with _FILE.open("rb") as file:
        shift = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)

    def now() -> float:
        return clock() + type(clock())(struct.unpack("d", shift[:])[0] * unit)

    return now


time.time = _shifted(time.time, 1)
time.time_ns = _shifted(time.time_ns, 1e9)  # type: ignore[assignment]
