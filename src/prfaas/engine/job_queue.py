"""An engine's bounded job queue, with cancellations and the request to close.

Any thread adds jobs and cancels them; the engine's thread takes them. The queue does not
depend on how jobs are computed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from prfaas.engine.api import EngineJob
from prfaas.errors import EngineError, PrfaasError
from prfaas.types import NotNow

RETRY_S = 1.0  # in a NotNow
IDLE_S = 1.0  # an idle engine wakes up this often even without a notification


class HasJob(Protocol):
    @property
    def job(self) -> EngineJob: ...


S = TypeVar("S", bound=HasJob)


class JobQueue(Generic[S]):
    def __init__(self, max_waiting: int) -> None:
        self.changed = threading.Condition()  # its lock is reentrant
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
            self._cancelled.discard(sequence.job.id)  # it was meant for an earlier job with this id
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
        """Ids of jobs to end now. A job may have ended already."""
        with self.changed:
            cancelled, self._cancelled = self._cancelled, set()
            return cancelled

    def remove(self, which: Callable[[S], bool]) -> list[S]:
        """Removes and returns the waiting jobs that `which` selects."""
        with self.changed:
            removed = [sequence for sequence in self.waiting if which(sequence)]
            self.waiting = deque(sequence for sequence in self.waiting if not which(sequence))
            return removed

    def wait_for_work(self, *, busy: bool) -> bool:
        """Returns at once when `busy`. False when the engine must close."""
        with self.changed:
            while not (self.closing or self.waiting or busy):
                self._cancelled.clear()
                self.changed.wait(IDLE_S)
            return not self.closing


def as_ours(error: Exception) -> Exception:
    """The job's error as a PrfaasError."""
    if isinstance(error, PrfaasError):
        return error
    ours = EngineError(f"{type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
