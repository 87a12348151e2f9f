"""The worker processes of a kvd: started with it, replaced when they end, killed when they hang."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from prfaas.clock import Clock, MonotonicClock
from prfaas.errors import ConnectionLost
from prfaas.security.tls import TlsContents
from prfaas.service.cores import usable_cores
from prfaas.transport.workers.process import ANSWER_S, WorkerProcess

log = logging.getLogger(__name__)

MOST_WORKERS = 8
_CHECK_S = 2.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
_STABLE_S = 30.0  # a worker that ran for this long is replaced at once


def default_workers(cores: float | None = None) -> int:
    """Half of the cores, because the engine and the kvd need some, too; none where that is one:
    a single worker is slower than the kvd itself."""
    cores = usable_cores() if cores is None else cores
    return min(MOST_WORKERS, int(cores) // 2) if cores >= 4 else 0


class WorkerPool:
    """Thread-safe. `close` ends the processes."""

    def __init__(
        self,
        count: int,
        *,
        credentials: Callable[[], TlsContents] | None = None,
        answer_s: float = ANSWER_S,
        clock: Clock | None = None,
    ) -> None:
        """`credentials` returns what the next handshake uses; None: connections use no TLS. A
        worker that does not answer for `answer_s` is killed."""
        self.count = count
        self.replaced = 0  # workers that have ended and were started again
        self._credentials = credentials
        self._answer_s = answer_s
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()  # guards the workers of the slots
        self._slots = [_Slot() for _ in range(count)]
        self._closing = threading.Event()
        self._ended = threading.Event()  # a connection has seen that its worker has ended
        self._start_missing()
        self._thread: threading.Thread | None = None
        if count:
            self._thread = threading.Thread(
                target=self._maintain, name="prfaas-workers", daemon=True
            )
            self._thread.start()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def credentials(self) -> TlsContents | None:
        return None if self._credentials is None else self._credentials()

    def take(self) -> WorkerProcess | None:
        """The worker with the fewest connections; None when no worker runs. The next connection
        counts as the worker's from now on: several connections are made at the same time. The
        caller passes the worker to a `WorkerChannel`, or calls its `leave`."""
        with self._lock:
            workers = [slot.worker for slot in self._slots if slot.worker is not None]
            alive = [worker for worker in workers if worker.alive]
            chosen = min(alive, key=lambda worker: worker.connections, default=None)
            if chosen is not None:
                chosen.join()
        return chosen

    def report_lost(self) -> None:
        """A connection has lost its worker: it is replaced soon."""
        self._ended.set()

    @property
    def pids(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(slot.worker.pid for slot in self._slots if slot.worker is not None)

    def close(self) -> None:
        """Call this when no connection uses a worker any more. Idempotent."""
        self._closing.set()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            workers = [slot.worker for slot in self._slots if slot.worker is not None]
            for slot in self._slots:
                slot.worker = None
        for worker in workers:
            worker.close()

    def _maintain(self) -> None:
        wait_s = _CHECK_S
        while True:
            self._ended.wait(wait_s)
            self._ended.clear()
            if self._closing.is_set():
                return
            with self._lock:
                workers = [slot.worker for slot in self._slots if slot.worker is not None]
            for worker in workers:
                try:
                    worker.ping()
                except ConnectionLost as error:
                    log.warning("worker process %d: %s", worker.pid, error)
                    worker.kill()
            wait_s = min(_CHECK_S, self._start_missing())

    def _start_missing(self) -> float:
        """Returns the time until the next attempt, for workers that have ended again and again."""
        now, wait_s = self._clock.now(), math.inf
        for slot in self._slots:
            if slot.worker is not None and slot.worker.alive:
                continue
            ended = slot.worker
            if ended is not None:
                with self._lock:
                    slot.worker = None
                ended.close()
                self.replaced += 1
                log.warning(
                    "worker process %d has ended (%s) and is replaced", ended.pid, ended.end
                )
                slot.back_off(now, stable=now - slot.started_s >= _STABLE_S)
            if now < slot.not_before_s:
                wait_s = min(wait_s, slot.not_before_s - now)
                continue
            try:
                worker = WorkerProcess(self._answer_s)
            except OSError as error:
                log.warning("cannot start a worker process: %s", error)
                slot.back_off(now, stable=False)
                wait_s = min(wait_s, slot.backoff_s)
                continue
            with self._lock:
                slot.worker, slot.started_s = worker, now
        return wait_s


class _Slot:
    """The place of one worker."""

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None
        self.started_s = 0.0
        self.backoff_s = 0.0
        self.not_before_s = 0.0  # the next start

    def back_off(self, now: float, *, stable: bool) -> None:
        longer_s = min(max(_FIRST_BACKOFF_S, 2 * self.backoff_s), _MAX_BACKOFF_S)
        self.backoff_s = 0.0 if stable else longer_s
        self.not_before_s = now + self.backoff_s
