"""The short-term loop: as often as kvds are polled, the router adjusts to the latest reports."""

from __future__ import annotations

import asyncio

from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.polling import Poller
from prfaas.gateway.router import Router


async def run_short_term_loop(fleet: Fleet, router: Router, poller: Poller) -> None:
    """Runs the short-term loop until cancelled."""
    while True:
        await asyncio.sleep(fleet.timeouts.kvd_poll_s)
        fleet.update()
        router.adjust()
        poller.drop_expired()
