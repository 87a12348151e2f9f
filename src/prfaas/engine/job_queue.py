"""An engine's bounded job queue, with cancellations and the request to close.

Any thread adds jobs and cancels them; the engine's thread takes them. Tenants take turns, by the
prompt tokens that their jobs compute, and no tenant takes every slot (`contracts.slot_shares`) or
every place. The queue does not depend on how jobs are computed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from prfaas.contracts.slot_shares import has_slot
from prfaas.engine.api import EngineJob
from prfaas.errors import EngineError, PrfaasError
from prfaas.scheduler.waiting import FairClock
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
        self._turns = FairClock()  # of the tenants that had jobs here since it was last empty

    def put(self, sequence: S) -> NotNow | None:
        with self.changed:
            if self.closing:
                return NotNow("the engine is closing", RETRY_S)
            tenant = sequence.job.tenant
            if not self._has_place(sequence):
                return NotNow(f"{len(self.waiting)} jobs are waiting", RETRY_S)
            if all(waiting.job.tenant != tenant for waiting in self.waiting):
                self._turns.start(tenant)
            self._cancelled.discard(sequence.job.id)  # it was meant for an earlier job with this id
            self.waiting.append(sequence)
            self.changed.notify()
        return None

    def _has_place(self, sequence: S) -> bool:
        """A tenant takes a place while fewer of its own jobs wait than places are left. So it has
        half of those that others leave it, and a request of many jobs finds places beside a flood.
        """
        tenant = sequence.job.tenant
        if not tenant:  # it shares with no other
            return len(self.waiting) < self._max_waiting
        own = sum(waiting.job.tenant == tenant for waiting in self.waiting)
        return own < self._max_waiting - len(self.waiting)

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

    def take(self, may_begin: Callable[[S], bool]) -> S | None:
        """Removes and returns the job that begins now; None: none may. The jobs of one tenant stay
        in order. Of the tenants whose first job `may_begin`, it is the turn of the one that was
        given least to compute (`FairClock`); among equals, of the one that has waited longest."""
        with self.changed:
            firsts: dict[str, int] = {}
            for place, sequence in enumerate(self.waiting):
                firsts.setdefault(sequence.job.tenant, place)
            for tenant in sorted(firsts, key=lambda name: self._turns.tag(name, waits=True)):
                sequence = self.waiting[firsts[tenant]]
                if may_begin(sequence):
                    del self.waiting[firsts[tenant]]
                    self._turns.charge(tenant, computed_tokens(sequence.job), waits=True)
                    if not self.waiting:
                        self._turns = FairClock()  # no other tenant waits for its turn
                    return sequence
            return None

    def remove(self, which: Callable[[S], bool]) -> list[S]:
        """Removes and returns the waiting jobs that `which` selects. It is asked once for each."""
        with self.changed:
            removed, kept = list[S](), deque[S]()
            for sequence in self.waiting:
                (removed if which(sequence) else kept).append(sequence)
            self.waiting = kept
            return removed

    def put_back(self, sequences: Collection[S]) -> None:
        """They were removed, and have not begun: they are the first ones again."""
        with self.changed:
            for sequence in reversed(list(sequences)):
                self.waiting.appendleft(sequence)

    def wait_for_work(self, *, busy: bool) -> bool:
        """Returns at once when `busy`. False when the engine must close."""
        with self.changed:
            while not (self.closing or self.waiting or busy):
                self._cancelled.clear()
                self.changed.wait(IDLE_S)
            return not self.closing


def slot_rule(held: Collection[HasJob], slots: int) -> Callable[[HasJob], bool]:
    """Whether a job may take one of the slots that are left beside those that `held` has. Jobs
    without a tenant share with no other, so that nothing is kept free from them."""
    counts = Counter(one.job.tenant for one in held)
    counts[""] = 0
    return lambda sequence: has_slot(len(held), counts[sequence.job.tenant], slots)


def computed_tokens(job: EngineJob) -> int:
    """Tokens of its prompt that the engine computes."""
    return len(job.prompt) - (job.resume.tokens if job.resume is not None else 0)


def as_ours(error: Exception) -> Exception:
    """The job's error as a PrfaasError."""
    if isinstance(error, PrfaasError):
        return error
    ours = EngineError(f"{type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
