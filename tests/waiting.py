"""Waiting for a condition that has no event to wait on. Bounded; never a fixed pause."""

from __future__ import annotations

import time
from collections.abc import Callable

# How long a test waits for what must happen. Only a hang takes so long, also on a busy machine; no
# test waits this long when it passes.
PATIENCE_S = 60.0
HANG_S = 200.0  # for a whole scenario: on the busiest machine, only one that hangs takes so long


def wait_until(condition: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.002)
