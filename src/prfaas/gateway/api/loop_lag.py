"""How long others keep the event loop from what is due: every stream waits for as long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LOOK_EVERY_S = 0.01


@asynccontextmanager
async def watched(observe: Callable[[float], None]) -> AsyncIterator[None]:
    """Tells `observe` how many seconds late each look was."""
    looking = asyncio.create_task(_look(observe))
    try:
        yield
    finally:
        looking.cancel()


async def _look(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LOOK_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)
        observe(max(0.0, loop.time() - due_s))
