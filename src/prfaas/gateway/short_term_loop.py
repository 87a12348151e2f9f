"""The short-term loop: as often as kvds are polled, the router adjusts to the latest reports."""

from __future__ import annotations

from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.polling import Poller
from prfaas.gateway.router import Router
from prfaas.supervision import repeat


async def run_short_term_loop(fleet: Fleet, router: Router, poller: Poller) -> None:
    """Runs the short-term loop until cancelled. A part that fails does not keep the others from
    running."""

    async def step() -> None:
        fleet.update()
        for part in (router.adjust, poller.drop_expired):
            fleet.failures.contain("short_term", part)

    await repeat(step, fleet.timeouts.kvd_poll_s, fleet.failures, loop="short_term")
