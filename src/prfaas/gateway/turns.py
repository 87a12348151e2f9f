"""Turns of tenants at a pool of workers: the processes that read bodies, the threads that tokenise.

`TurnOrder` says who is next, and is bookkeeping only. `Turns` waits. Knows nothing of what the
workers do. Two rules keep one tenant's flood from the requests of others:

    turns           The tenant that has used the least of the workers' time, divided by its weight,
                    is next. The time counts while it is used, because before a job nobody knows it.
    one is left     With several tenants, tenants that have had long jobs together take all workers
                    but one. So a short job waits for short jobs only, also when every other tenant
                    sends bodies that take seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from prfaas.clock import Clock
from prfaas.errors import RequestError
from prfaas.gateway.tenants import RETRY_S, Tenants
from prfaas.scheduler.waiting import FairClock

# Of a processor. A longer job delays another tenant's prompt noticeably; it tokenises tens of
# thousands of tokens. One worker alone does ten of these a second.
LONG_S = 0.1
REMEMBERED_S = 600.0  # after its latest long job a tenant counts as one that has them
MOST_REMEMBERED = 1024  # tenants
WAIT_S = 30.0
QUEUED_PER_TENANT = 64
W = TypeVar("W")
T = TypeVar("T")


class _Running(NamedTuple):
    tenant: str
    began_s: float
    cpu_s: float | None = None  # of a job that was measured


class TurnOrder(Generic[T]):
    """The items that wait for a worker, and the workers, which are numbers here."""

    def __init__(self, workers: int, tenants: Tenants) -> None:
        self._workers = workers
        self._tenants = tenants
        self._clock = FairClock()  # of seconds of workers, divided by the weights
        self._waiting: dict[str, deque[T]] = {}  # by tenant: equals take turns
        self._idle = list(reversed(range(workers)))
        self._running: dict[int, _Running] = {}  # by worker
        self._long_until_s: dict[str, float] = {}  # by tenant, the latest at the end

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def count(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def add(self, tenant: str, item: T) -> None:
        """The item waits. A tenant that had nothing to do has neither credit nor debt from it."""
        if tenant not in self._waiting:
            if not any(job.tenant == tenant for job in self._running.values()):
                self._clock.start(tenant)
            self._waiting[tenant] = deque()
        self._waiting[tenant].append(item)

    def discard(self, tenant: str, item: T) -> None:
        """The item waits no more, if it did."""
        queue = self._waiting.get(tenant)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._waiting[tenant]

    def take(self, now_s: float) -> tuple[int, T] | None:
        """The next item and its worker, which is busy until `end`. None: no item may go now."""
        if not self._idle:
            return None
        held = sum(self._is_long(job.tenant, now_s) for job in self._running.values())
        leave_one = self._tenants.several and 0 < self._workers - 1 <= held
        may = [t for t in self._waiting if not (leave_one and self._is_long(t, now_s))]
        if not may:
            return None
        tenant = min(may, key=lambda name: self._used(name, now_s))
        queue = self._waiting.pop(tenant)
        item = queue.popleft()
        if queue:
            self._waiting[tenant] = queue  # after the tenants that have used as much
        return self._give(tenant, now_s), item

    def take_idle(self, now_s: float) -> int | None:
        """An idle worker for work that is of no tenant."""
        self._clock.start("")
        return self._give("", now_s) if self._idle else None

    def begin(self, worker: int, now_s: float) -> None:
        """What the worker has done since it was taken was not its tenant's job, which begins
        now."""
        self._running[worker] = self._running[worker]._replace(began_s=now_s)

    def measured(self, worker: int, cpu_s: float) -> None:
        """The worker's job has taken so much of a processor. On a busy machine a short job takes a
        long time, too; it is not a long one."""
        self._running[worker] = self._running[worker]._replace(cpu_s=cpu_s)

    def end(self, worker: int, now_s: float) -> None:
        """The worker is idle again, and its tenant pays for the time."""
        tenant, began_s, cpu_s = self._running.pop(worker)
        self._idle.append(worker)
        used_s = now_s - began_s
        self._clock.charge(tenant, used_s / self._tenants.weight(tenant), waits=True)
        if (used_s if cpu_s is None else cpu_s) > LONG_S:
            self._long_until_s.pop(tenant, None)
            self._long_until_s[tenant] = now_s + REMEMBERED_S
            if len(self._long_until_s) > MOST_REMEMBERED:
                del self._long_until_s[next(iter(self._long_until_s))]
        active = self._waiting.keys() | {job.tenant for job in self._running.values()}
        if len(self._clock.tags) > 2 * len(active) + 16:
            self._clock.forget(active)

    def check(self) -> None:
        """Raises AssertionError where a worker is lost or given twice, or an item cannot be
        next."""
        assert sorted([*self._idle, *self._running]) == list(range(self._workers))
        assert all(queue for queue in self._waiting.values())
        active = self._waiting.keys() | {job.tenant for job in self._running.values()}
        assert active <= self._clock.tags.keys()
        assert len(self._long_until_s) <= MOST_REMEMBERED

    def _give(self, tenant: str, now_s: float) -> int:
        worker = self._idle.pop()
        self._running[worker] = _Running(tenant, now_s)
        return worker

    def _used(self, tenant: str, now_s: float) -> float:
        """Seconds of workers that the tenant has used, also in jobs that still run, divided by its
        weight. A tenant that was idle starts with those of the others."""
        running_s = sum(now_s - job.began_s for job in self._of(tenant))
        return self._clock.tags[tenant] + running_s / self._tenants.weight(tenant)

    def _is_long(self, tenant: str, now_s: float) -> bool:
        """Whether the tenant has had long jobs lately, or has one now."""
        return self._long_until_s.get(tenant, now_s) > now_s or any(
            now_s - job.began_s > LONG_S for job in self._of(tenant)
        )

    def _of(self, tenant: str) -> list[_Running]:
        return [job for job in self._running.values() if job.tenant == tenant]


class Turns(Generic[W]):
    """A pool of workers, which may be any objects."""

    def __init__(
        self,
        workers: Sequence[W],
        tenants: Tenants,
        clock: Clock,
        *,
        queued_per_tenant: int = QUEUED_PER_TENANT,
        wait_s: float = WAIT_S,
    ) -> None:
        self._workers = workers
        self._clock = clock
        self._queued_per_tenant = queued_per_tenant
        self._wait_s = wait_s
        self._order = TurnOrder[asyncio.Future[int]](len(workers), tenants)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def waiting(self) -> int:
        return len(self._order)

    async def run(self, tenant: str, work: Callable[[W], Coroutine[Any, Any, T]]) -> T:
        """The result of `work(worker)`, which is called when it is the tenant's turn. When the
        caller is cancelled after that, the work goes on, and its worker is free only at its end.
        Raises `RequestError` where too much of the tenant waits, or waits for too long."""
        worker = await self._turn(tenant)
        return await asyncio.shield(self._start(worker, work))

    def run_if_idle(self, work: Callable[[W], Coroutine[Any, Any, None]]) -> None:
        """Starts work that is of no tenant, if a worker has nothing to do."""
        worker = self._order.take_idle(self._clock.now())
        if worker is not None:
            self._start(worker, work)

    def begin(self, worker: W) -> None:
        """For work that had to wait for its worker to become ready: its tenant's time begins
        now."""
        self._order.begin(self._workers.index(worker), self._clock.now())

    def measured(self, worker: W, cpu_s: float) -> None:
        """For work that knows how much of a processor it has taken."""
        self._order.measured(self._workers.index(worker), cpu_s)

    async def close(self) -> None:
        """Cancels the work that has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _turn(self, tenant: str) -> int:
        """The number of a worker. The caller has to start its work without waiting."""
        count = self._order.count(tenant)
        if count >= self._queued_per_tenant:
            raise _overloaded(f"{count} requests of this tenant wait to be read")
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._order.add(tenant, turn)
        self._give_turns()
        try:
            async with asyncio.timeout(self._wait_s):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._end(turn.result())  # its turn came in the same moment
            else:
                self._order.discard(tenant, turn)
            if isinstance(error, TimeoutError):
                problem = f"the request was not read within {self._wait_s:g} s"
                raise _overloaded(problem) from None
            raise

    def _give_turns(self) -> None:
        while (found := self._order.take(self._clock.now())) is not None:
            worker, turn = found
            if turn.done():
                self._order.end(worker, self._clock.now())  # the caller has just left
            else:
                turn.set_result(worker)

    def _start(self, worker: int, work: Callable[[W], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        try:
            task = asyncio.create_task(work(self._workers[worker]))
        except BaseException:
            self._end(worker)
            raise
        self._tasks.add(task)

        def ended(_: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # the caller may have left: then no other code asks for it
            self._end(worker)

        # Not in the task: a task that is cancelled before its first step never runs.
        task.add_done_callback(ended)
        return task

    def _end(self, worker: int) -> None:
        self._order.end(worker, self._clock.now())
        self._give_turns()


def _overloaded(problem: str) -> RequestError:
    return RequestError(503, "overloaded", problem, retry_after_s=RETRY_S)
