"""How a service stops. After SIGTERM:

1. `/ready` fails, and the service goes on as before for `leave_s`: load balancers, orchestrators
   and gateways poll, and send requests until they have noticed.
2. It accepts nothing new.
3. It finishes what runs, within `drain_s`.

SIGINT, and every further signal, ends the wait of step 1.
"""

from __future__ import annotations

import asyncio
import logging
import signal

_LOG = logging.getLogger(__name__)


class Stopping:
    """Whether a service has been told to stop, and how far it is."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """The first call begins to stop, the next one ends the wait of `wait_until_left`."""
        if self.begun:
            self._hurried.set()
        self._begun.set()

    def hurry(self) -> None:
        """Begins to stop, without a wait for those that send requests."""
        self._hurried.set()
        self._begun.set()

    def handle_signals(self) -> None:
        """From now on SIGTERM and SIGINT stop the service."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.begin)
        loop.add_signal_handler(signal.SIGINT, self.hurry)

    async def wait_until_left(self, leave_s: float) -> None:
        """Returns when the service has been told to stop and `leave_s` have passed since then, or
        the wait has been cut short."""
        await self._begun.wait()
        _LOG.info("stopping: not ready any more")
        try:
            async with asyncio.timeout(leave_s):
                await self._hurried.wait()
        except TimeoutError:
            pass
        _LOG.info("draining")
