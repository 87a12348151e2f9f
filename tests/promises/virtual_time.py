"""An event loop whose time passes only while nothing is left to do.

Time jumps to the next timer once no socket has data and no thread works, so that a test of minutes
takes as long as its computation, and says nothing about the speed of the machine: everything that
is not a timer takes no time. All ends of the sockets have to be in this loop.
"""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_THREAD_S = 0.01  # between two looks at threads that work


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    def loop() -> VirtualTimeLoop:
        return VirtualTimeLoop(VirtualTimeSelector())

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main(VirtualClock(runner.get_loop())))


class VirtualClock:
    """The time of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time


class VirtualTimeSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.threads = 0  # that work for the loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or timeout is None or timeout <= 0:
            return found or super().select(timeout)
        os.sched_yield()  # the kernel passes on what was just sent on loopback
        if found := super().select(_THREAD_S if self.threads else 0):
            return found
        if not self.threads:
            self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: VirtualTimeSelector) -> None:
        self._virtual = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._virtual.threads += 1
        future.add_done_callback(self._end_of_thread)
        return future

    def _end_of_thread(self, _: asyncio.Future[Any]) -> None:
        self._virtual.threads -= 1
