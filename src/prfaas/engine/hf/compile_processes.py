"""Compiles kernels in copies of this process, because a compiler in threads waits for the
interpreter lock most of the time.

A copy (`os.fork`) needs no imports and no arguments: it calls the same function as this process
would, and ends. What it compiled is in the kernel cache on disk, where this process then finds it.
A copy never uses the device. Copies are made only while a node starts, when few other threads run
and none of them holds a lock for long.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

_LOG = logging.getLogger(__name__)
COPY_S = 120.0  # for one compilation; seconds are usual
T = TypeVar("T")


class CopyingExecutor(Executor):
    """Calls each function in a copy of this process first, and then here. A copy that fails, or
    does not end in time, changes nothing but the time: the call here reports every error."""

    def __init__(self, max_workers: int, *, timeout_s: float = COPY_S) -> None:
        self._threads = ThreadPoolExecutor(max_workers)
        self._timeout_s = timeout_s

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        def work() -> T:
            _run_in_copy(lambda: fn(*args, **kwargs), self._timeout_s)
            return fn(*args, **kwargs)

        return self._threads.submit(work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def _run_in_copy(work: Callable[[], object], timeout_s: float) -> None:
    try:
        with warnings.catch_warnings():
            # Python warns of copies of a process with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            process_id = os.fork()
    except OSError as error:  # too little memory, or too many processes
        _LOG.info("a kernel is compiled in this process: %s", error)
        return
    if process_id == 0:
        try:
            work()
        finally:
            os._exit(0)  # without the ends of what the copied process has begun
    _wait(process_id, timeout_s)


def _wait(process_id: int, timeout_s: float) -> None:
    handle = os.pidfd_open(process_id)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(timeout_s * 1000.0):
            _LOG.warning("compiling a kernel took more than %g s in its own process", timeout_s)
            os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    finally:
        os.close(handle)
