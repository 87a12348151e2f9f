"""The short-term loop: every half second, the router adjusts to the latest reports."""

from __future__ import annotations

import asyncio

from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.polling import KVD_EVERY_S, Poller
from prfaas.gateway.router import Router


async def run_short_term_loop(fleet: Fleet, router: Router, poller: Poller) -> None:
    """Runs until cancelled."""
    while True:
        await asyncio.sleep(KVD_EVERY_S)
        fleet.update()
        router.adjust()
        poller.drop_expired()
