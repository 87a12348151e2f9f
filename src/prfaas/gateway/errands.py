"""Calls that may outlive the request they belong to: a prefill whose hand-off is in place already,
a transfer to be aborted when the client has gone. Owned by the gateway, bounded in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from prfaas.errors import PeerError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Errands:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: set[asyncio.Task[Any]] = set()

    def run(self, errand: Coroutine[Any, Any, T], within_s: float) -> asyncio.Task[T | PeerError]:
        """Its result, or what went wrong. Cancelling the task is allowed."""
        task = self._tasks.create_task(_bounded(errand, within_s))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def __len__(self) -> int:
        return len(self._running)

    async def end(self, patience_s: float) -> None:
        """Waits for all, then cancels them."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=patience_s)
            for task in late:
                task.cancel()


async def _bounded(errand: Coroutine[Any, Any, T], within_s: float) -> T | PeerError:
    try:
        async with asyncio.timeout(within_s):
            return await errand
    except PeerError as error:
        return error
    except TimeoutError:
        return PeerError(f"not done within {within_s:g} s")
    except Exception as error:  # a fault of ours ends this errand, not the gateway
        log.exception("an errand failed")
        return PeerError(str(error))
