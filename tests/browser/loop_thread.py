"""An event loop in a thread of its own. Selenium blocks while the browser works, and meanwhile the
processes of a deployment are still read and watched, and requests are still sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from tests.waiting import HANG_S

T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop of the tests")

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], within_s: float = HANG_S) -> T:
        """Waits for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enters and leaves the context in one task, as some contexts require."""
        entered: asyncio.Future[T]
        leave: asyncio.Event

        async def begin() -> None:
            nonlocal entered, leave
            entered, leave = self._loop.create_future(), asyncio.Event()

        async def hold() -> None:
            try:
                async with manager as value:
                    entered.set_result(value)
                    await leave.wait()
            except BaseException as error:
                if entered.done():
                    raise
                entered.set_exception(error)

        async def wait_until_entered() -> T:
            return await entered

        self.run(begin())
        held = asyncio.run_coroutine_threadsafe(hold(), self._loop)
        value = self.run(wait_until_entered())
        try:
            yield value
        finally:
            self._loop.call_soon_threadsafe(leave.set)
            held.result(HANG_S)
