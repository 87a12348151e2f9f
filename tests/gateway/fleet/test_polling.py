from __future__ import annotations

import asyncio

from prfaas.gateway.fleet.polling import Poller
from prfaas.http_client.client import open_client
from prfaas.testing.clock import FakeClock
from tests.gateway.test_router import router


async def test_a_member_that_registers_during_the_shutdown_is_not_watched() -> None:
    """Nor is the coroutine left behind that would have watched it: Python would warn of it."""
    clock = FakeClock()
    subject = router(clock)

    async with open_client() as calls:
        async with asyncio.TaskGroup() as tasks:
            watching = Poller(subject, calls, clock, tasks)
        watching.watch(next(iter(subject.members)))
        watching.end()
