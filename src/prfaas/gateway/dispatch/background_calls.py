"""Background calls: HTTP calls that may outlive the request they belong to, such as a prefill whose
hand-off is already in place, or the abort of a transfer whose client has disconnected.

The tasks belong to this object and to no task group, so that a request that is cut off while the
gateway shuts down can still start the calls that give back what it reserved. Every call is bounded
in time, and so is the wait for the last of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from prfaas.errors import PeerError

log = logging.getLogger(__name__)
T = TypeVar("T")


class BackgroundCalls:
    """Used as a context: leaving it lets the calls that must finish do so, within `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._running: dict[asyncio.Task[Any], bool] = {}  # and whether each must finish
        self._ending = False
        self._ended = False

    async def __aenter__(self) -> BackgroundCalls:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    def run(
        self, call: Coroutine[Any, Any, T], within_s: float, *, must_finish: bool = False
    ) -> asyncio.Future[T | PeerError]:
        """Returns a future of the call's result or error. The caller may cancel it.

        A shutdown cancels the call at once, unless it `must_finish`. A call that starts too
        late is closed, and its result is an error.
        """
        if self._ended or (self._ending and not must_finish):
            call.close()
            refused: asyncio.Future[T | PeerError] = asyncio.get_running_loop().create_future()
            refused.set_result(PeerError("the gateway is shutting down"))
            return refused
        task = asyncio.create_task(_bounded(call, within_s))
        self._running[task] = must_finish
        task.add_done_callback(self._running.pop)
        # A task that is cancelled before its first step never awaits the call.
        task.add_done_callback(lambda _: call.close())
        return task

    def __len__(self) -> int:
        return len(self._running)

    async def end(self) -> None:
        """Cancels the calls that need not finish, waits for the others and for the calls that these
        start, and cancels what is left after `patience_s`."""
        self._ending = True
        for task, must_finish in list(self._running.items()):
            if not must_finish:
                task.cancel()
        try:
            async with asyncio.timeout(self._patience_s):
                while self._running:
                    await asyncio.wait(self._running)
        except TimeoutError:
            log.warning(
                "%d background calls did not finish within %g s of the shutdown",
                len(self._running),
                self._patience_s,
            )
        finally:
            self._ended = True
            late = list(self._running)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def _bounded(call: Coroutine[Any, Any, T], within_s: float) -> T | PeerError:
    try:
        async with asyncio.timeout(within_s):
            return await call
    except PeerError as error:
        return error
    except TimeoutError:
        return PeerError(f"not finished within {within_s:g} s")
    except Exception as error:  # a bug in the gateway ends this call, not the process
        log.exception("a background call failed")
        return PeerError(str(error))
