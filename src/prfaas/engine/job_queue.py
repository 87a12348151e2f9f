"""Where an engine's jobs arrive: a bounded queue, cancellations, and the word that it closes.

Any thread puts jobs in and cancels them; the engine's own thread takes them out. Knows nothing of
how jobs are computed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from prfaas.engine.api import EngineJob
from prfaas.errors import EngineError, PrfaasError
from prfaas.types import NotNow

RETRY_S = 1.0  # for whoever was told "not now"
IDLE_S = 1.0  # an idle engine looks up this often even when nobody wakes it


class HasJob(Protocol):
    @property
    def job(self) -> EngineJob: ...


S = TypeVar("S", bound=HasJob)


class JobQueue(Generic[S]):
    def __init__(self, max_waiting: int) -> None:
        self.changed = threading.Condition()  # its lock may be taken twice
        self.waiting: deque[S] = deque()  # guarded, as is everything in the queue
        self.closing = False
        self._cancelled: set[str] = set()
        self._max_waiting = max_waiting

    def put(self, sequence: S) -> NotNow | None:
        with self.changed:
            if self.closing:
                return NotNow("the engine is closing", RETRY_S)
            if len(self.waiting) >= self._max_waiting:
                return NotNow(f"{len(self.waiting)} jobs are waiting", RETRY_S)
            self._cancelled.discard(sequence.job.id)  # meant for an earlier job of that name
            self.waiting.append(sequence)
            self.changed.notify()
        return None

    def cancel(self, job_id: str) -> None:
        with self.changed:
            self._cancelled.add(job_id)
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify()

    # The engine's thread --------------------------------------------------------------------------

    @property
    def has_cancelled(self) -> bool:
        return bool(self._cancelled)

    def take_cancelled(self) -> set[str]:
        """Ids to be ended now, of jobs that wait or run; others have ended before."""
        with self.changed:
            cancelled, self._cancelled = self._cancelled, set()
            return cancelled

    def remove(self, which: Callable[[S], bool]) -> list[S]:
        """Takes out jobs that have not begun."""
        with self.changed:
            removed = [sequence for sequence in self.waiting if which(sequence)]
            self.waiting = deque(sequence for sequence in self.waiting if not which(sequence))
            return removed

    def wait_for_work(self, *, busy: bool) -> bool:
        """Returns at once for an engine that is busy. False: the engine is to close."""
        with self.changed:
            while not (self.closing or self.waiting or busy):
                self._cancelled.clear()
                self.changed.wait(IDLE_S)
            return not self.closing


def as_ours(error: Exception) -> Exception:
    """What a job failed with, said in this project's own errors."""
    if isinstance(error, PrfaasError):
        return error
    ours = EngineError(f"{type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
