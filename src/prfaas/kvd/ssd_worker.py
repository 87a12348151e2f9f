"""The thread that reads and writes the SSD tier, so that the event loop never does.

One thread for each kvd runs the jobs of its pool (`cache/storage/ssd_jobs.py`) in the order in
which they were submitted; the event loop finishes them. The pool limits the queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence

from prfaas.cache.storage.preparation import Preparation
from prfaas.cache.storage.ssd_jobs import SsdJob
from prfaas.clock import Clock

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # for the job that runs when the kvd ends
REPORT_S = 60.0  # between two log lines about a slow SSD
_BATCH = 32  # jobs that the loop finishes together


class SsdWorker:
    """Made and used on an event loop. `on_finished` is called there after jobs have finished, or
    were started ahead of requests."""

    def __init__(self, clock: Clock, on_finished: Callable[[], None]) -> None:
        self._clock = clock
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Sequence[SsdJob] | None] = queue.SimpleQueue()
        # Submitted and not finished, oldest first; a future where a request waits for the job.
        self._waiting: dict[SsdJob, asyncio.Future[None] | None] = {}
        self._closing = threading.Event()
        self._late = 0  # requests that have not been reported yet
        self._report_s = -math.inf  # not before
        self._thread = threading.Thread(target=self._run, name="prfaas-kvd-ssd", daemon=True)
        self._thread.start()

    async def carry_out(self, preparation: Preparation, within_s: float) -> None:
        """Returns when the preparation needs no more jobs, or after `within_s`: the reservation
        then drops blocks instead of spilling them, and does not find what was not read back. Does
        not wait when there is nothing to do."""
        try:
            async with asyncio.timeout(within_s):
                while jobs := preparation.next_jobs(self._clock.now()):
                    if self._closing.is_set():
                        return
                    self._submit([job for job in jobs if job not in self._waiting])
                    await self._finished(jobs[-1])
        except TimeoutError:
            self._late += 1
            now = self._clock.now()
            if now >= self._report_s:
                log.warning(
                    "%d requests did not wait longer than %g s for the SSD tier: blocks were "
                    "dropped or not read back",
                    self._late,
                    within_s,
                )
                self._late, self._report_s = 0, now + REPORT_S

    async def run_all(self, next_jobs: Callable[[float], Sequence[SsdJob]]) -> None:
        """Runs what `next_jobs` starts, step by step, until it starts nothing. No request waits for
        this, and each step comes after the jobs of requests, so that it needs no limit of time."""
        while not self._closing.is_set():
            jobs = next_jobs(self._clock.now())
            self._on_finished()  # it may also have dropped blocks
            if not jobs:
                return
            self._submit([job for job in jobs if job not in self._waiting])
            await self._finished(jobs[-1])

    def close(self) -> bool:
        """Ends the thread after its present job. False when that job does not end in time: the
        thread may still use the file."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        for future in self._waiting.values():
            if future is not None and not future.done():
                future.set_result(None)
        return not self._thread.is_alive()

    def _submit(self, jobs: Sequence[SsdJob]) -> None:
        for first in range(0, len(jobs), _BATCH):
            batch = jobs[first : first + _BATCH]
            self._waiting.update(dict.fromkeys(batch))
            self._queue.put(batch)

    async def _finished(self, job: SsdJob) -> None:
        future = self._waiting[job]
        if future is None:
            future = self._waiting[job] = self._loop.create_future()
        await asyncio.shield(future)  # several requests may wait for it

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None and not self._closing.is_set():
            for job in batch:
                try:
                    job.run()
                except Exception:  # the job counts as failed, and costs its block only
                    log.exception("a job of the SSD tier failed")
            try:
                self._loop.call_soon_threadsafe(self._finish, batch)
            except RuntimeError:
                return  # the event loop is closed
            del batch, job  # they have views of the arena

    def _finish(self, batch: Sequence[SsdJob]) -> None:
        now = self._clock.now()
        for job in batch:
            job.finish(now)
            future = self._waiting.pop(job)
            if future is not None and not future.done():
                future.set_result(None)
        self._on_finished()
