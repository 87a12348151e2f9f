"""Reads and writes of the SSD tier, as jobs that the pool's owner may hand to another thread.

    the owner starts a job --► any thread: run() --► the owner: finish(now)

`run` uses the file and the bytes of the job's pages only. Everything else happens in `finish`,
which the owner calls once for every job, in the order of the jobs, also when `run` was skipped: the
job then counts as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from prfaas.cache.blocks import Block
from prfaas.cache.storage.ssd import Slot, SpillFile


class SpillJob:
    """Writes a block that has left memory, or is about to, to the SSD.

    A cancelled job has no effect: its block is in use again, or is gone from both tiers. The pages
    may then change while they are written, because the copy is not used.
    """

    def __init__(
        self,
        block: Block,
        file: SpillFile,
        pages: tuple[int, ...],
        views: Sequence[memoryview],
        on_finish: Callable[[SpillJob, float], None],
    ) -> None:
        self.block = block
        self.pages = pages  # of the file
        self.digest: bytes | None = None  # None: not written
        self.cancelled = False
        self._file = file
        self._views = views
        self._on_finish = on_finish

    def run(self) -> None:
        if not self.cancelled:
            self.digest = self._file.write(self.pages, self._views)

    def finish(self, now: float) -> None:
        self._views = ()  # the arena cannot be unmapped while it has views
        self._on_finish(self, now)


class ReadJob:
    """Reads a block from the SSD into pages that are reserved for it."""

    def __init__(
        self,
        block: Block,
        file: SpillFile,
        slot: Slot,
        views: Sequence[memoryview],
        on_finish: Callable[[ReadJob, float], None],
    ) -> None:
        self.block = block
        self.slot = slot
        self.intact = False  # the bytes are in memory, and they are those that were written
        self._file = file
        self._views = views
        self._on_finish = on_finish

    @property
    def pages(self) -> tuple[int, ...]:
        return self.slot.pages

    def run(self) -> None:
        self.intact = self._file.read(self.slot, self._views)

    def finish(self, now: float) -> None:
        self._views = ()
        self._on_finish(self, now)


SsdJob: TypeAlias = SpillJob | ReadJob


class JobQueue:
    """The jobs that have not finished, oldest first, and a limit for what they read and write."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._jobs: dict[SsdJob, None] = {}
        self._pages = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[SsdJob]:
        return iter(self._jobs)

    def has_room(self, pages: int, *, after: int = 0) -> bool:
        """Whether a job of that size may be added, after others of `after` pages in all. A job of
        any size may be the only one."""
        is_only = not self._jobs and not after
        return is_only or self._pages + after + pages <= self._max_pages

    def add(self, job: SsdJob) -> None:
        self._jobs[job] = None
        self._pages += len(job.pages)

    def remove(self, job: SsdJob) -> None:
        del self._jobs[job]
        self._pages -= len(job.pages)
