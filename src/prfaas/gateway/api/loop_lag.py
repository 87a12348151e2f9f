"""Event-loop lag: how much later than due the loop runs a callback. Every stream waits as long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

PROBE_EVERY_S = 0.01


@asynccontextmanager
async def measure_lag(observe: Callable[[float], None]) -> AsyncIterator[None]:
    """Calls `observe` with the lag in seconds of each probe, until the block ends."""
    probing = asyncio.create_task(_probe(observe))
    try:
        yield
    finally:
        probing.cancel()


async def _probe(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + PROBE_EVERY_S
        await asyncio.sleep(PROBE_EVERY_S)
        observe(max(0.0, loop.time() - due_s))
