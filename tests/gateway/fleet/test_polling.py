from __future__ import annotations

import asyncio

from prfaas.gateway.fleet.polling import Poller
from prfaas.http_client.client import calling
from prfaas.testing.clock import FakeClock
from tests.gateway.fleets import fleet_and_router


async def test_a_member_that_registers_during_the_shutdown_is_not_polled() -> None:
    """Its coroutine is closed: Python would warn of one that was never awaited."""
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)

    async with calling() as http:
        async with asyncio.TaskGroup() as tasks:
            poller = Poller(fleet, http, clock, tasks)
        poller.start(next(iter(fleet.members)))
        poller.stop()
