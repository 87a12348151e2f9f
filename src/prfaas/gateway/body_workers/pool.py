"""The body workers of a gateway: two processes, and the bodies that wait for them.

Tenants take turns, so that one tenant's bodies do not delay another's by more than a job. A worker
that dies or takes too long costs the request whose body it reads an error, and no other: that body
is not read again, and a new process takes the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from prfaas.errors import RequestError
from prfaas.gateway.api.body_limits import RETRY_S, RequestBody
from prfaas.gateway.api.request_preparation import PreparedRequest
from prfaas.gateway.api.request_schema import Kind
from prfaas.gateway.body_workers.messages import (
    OUT_OF_MEMORY,
    Job,
    Prepared,
    Refused,
    WorkerSettings,
    unpack,
)
from prfaas.gateway.body_workers.process import Answer, WorkerLost, WorkerProcess

_LOG = logging.getLogger(__name__)
WORKERS = 2
JOB_S = 20.0  # tokenising a million tokens of text takes a few seconds
WAIT_S = 30.0
QUEUED_PER_TENANT = 64
_BASE_MEMORY_BYTES = 512 << 20  # of Python and a tokenizer
_MEMORY_PER_BYTE = 16  # of the longest body: a character may take 4 bytes, in several copies


def memory_bound(body_bytes: int) -> int:
    """The most memory that a worker takes for bodies of at most `body_bytes`."""
    return _BASE_MEMORY_BYTES + _MEMORY_PER_BYTE * body_bytes


class BodyWorkers:
    """A `LongBodies` of processes, which start with the first body. Use `body_workers`."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        workers: int = WORKERS,
        wait_s: float = WAIT_S,
        count_loss: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._job_s = settings.job_s
        self._wait_s = wait_s
        self._count_loss = count_loss
        self.processes = [WorkerProcess(settings) for _ in range(workers)]
        self._idle = list(reversed(self.processes))
        self._waiting: dict[str, deque[asyncio.Future[WorkerProcess]]] = {}  # by tenant, in turn
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def start_one(self) -> None:
        """Starts one worker in the background, so that the first long body need not wait for it."""
        if self._idle:
            self._run(self._warm_up(self._idle.pop()))

    async def prepare(self, kind: Kind, body: RequestBody, tenant: str) -> PreparedRequest:
        """See `prompts.LongBodies`."""
        worker = await self._next_worker(tenant)
        # The worker finishes its job also when the client leaves, and is free only then.
        task = self._run(self._work(worker, Job(kind, body.encoding), body.take_file()))
        return await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.processes))

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the client may have left: then no other code asks for it

    async def _warm_up(self, worker: WorkerProcess) -> None:
        try:
            await worker.start()
        except WorkerLost as error:
            self._record(error)
        finally:
            self._give_back(worker)

    async def _work(self, worker: WorkerProcess, job: Job, body: int) -> PreparedRequest:
        try:
            answer = await worker.run(job, body)
        except WorkerLost as error:
            raise self._record(error) from None
        finally:
            self._give_back(worker)
        return _request(answer)

    def _record(self, error: WorkerLost) -> RequestError:
        _LOG.warning("%s; its request is refused", error)
        self._count_loss("timeout" if error.timed_out else "died")
        if error.timed_out:
            return RequestError(
                400,
                "body_too_complex",
                f"the body takes longer than {self._job_s:g} s to read; send a shorter request",
            )
        if error.out_of_memory:
            return OUT_OF_MEMORY.request_error()
        return RequestError(
            503, "body_worker_lost", "the process that read the body ended unexpectedly"
        )

    # Turns ----------------------------------------------------------------------------------------

    async def _next_worker(self, tenant: str) -> WorkerProcess:
        if self._idle:
            return self._idle.pop()
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= QUEUED_PER_TENANT:
            raise _overloaded(f"{len(queue)} long bodies of this tenant wait to be read")
        turn: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result())  # its turn came in the same moment
            elif turn in queue:
                queue.remove(turn)
                if not queue and self._waiting.get(tenant) is queue:
                    del self._waiting[tenant]
            if isinstance(error, TimeoutError):
                raise _overloaded(f"the body was not read within {self._wait_s:g} s") from None
            raise

    def _give_back(self, worker: WorkerProcess) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # after the other tenants
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)


def _overloaded(problem: str) -> RequestError:
    return RequestError(503, "overloaded", problem, retry_after_s=RETRY_S)


def _request(answer: Answer) -> PreparedRequest:
    try:
        if isinstance(answer.reply, Refused):
            raise answer.reply.error()
        assert isinstance(answer.reply, Prepared), answer.reply
        (file,) = answer.files
        return unpack(answer.reply, file)
    finally:
        for file in answer.files:
            os.close(file)


@asynccontextmanager
async def body_workers(
    settings: WorkerSettings, count_loss: Callable[[str], None]
) -> AsyncIterator[BodyWorkers]:
    """Workers that end with the block."""
    workers = BodyWorkers(settings, count_loss=count_loss)
    try:
        yield workers
    finally:
        await workers.close()
