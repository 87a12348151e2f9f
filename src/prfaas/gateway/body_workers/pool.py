"""The body workers of a gateway: two processes, and the bodies that wait for their tenants' turns.

A worker that dies or takes too long costs the request whose body it reads an error, and no other:
that body is not read again, and a new process takes the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prfaas.clock import Clock
from prfaas.errors import RequestError
from prfaas.gateway.api.body_limits import RequestBody
from prfaas.gateway.api.content_encoding import most_bytes
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
from prfaas.gateway.body_workers.process import WorkerLost, WorkerProcess
from prfaas.gateway.tenants import Tenants
from prfaas.gateway.turns import Turns

_LOG = logging.getLogger(__name__)
WORKERS = 2
JOB_S = 20.0  # tokenising a million tokens of text takes a few seconds
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
        tenants: Tenants,
        clock: Clock,
        *,
        workers: int = WORKERS,
        count_loss: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._settings = settings
        self._count_loss = count_loss
        self.processes = [WorkerProcess(settings) for _ in range(workers)]
        self._turns = Turns(self.processes, tenants, clock)

    @property
    def waiting(self) -> int:
        return self._turns.waiting

    def start_one(self) -> None:
        """Starts one worker in the background, so that the first long body need not wait for it."""
        self._turns.run_if_idle(self._warm_up)

    async def prepare(
        self, kind: Kind, body: RequestBody, tenant: str, count_read: Callable[[int], None]
    ) -> PreparedRequest:
        """See `prompts.LongBodies`."""
        job = Job(kind, body.encoding)
        # The worker finishes its job also when the client leaves: then, too, the tenant pays.
        return await self._turns.run(
            tenant, lambda worker: self._work(worker, job, body.take_file(), count_read)
        )

    async def close(self) -> None:
        await self._turns.close()
        await asyncio.gather(*(worker.stop() for worker in self.processes))

    async def _warm_up(self, worker: WorkerProcess) -> None:
        try:
            await worker.start()
        except WorkerLost as error:
            self._record(error)

    async def _work(
        self, worker: WorkerProcess, job: Job, body: int, count_read: Callable[[int], None]
    ) -> PreparedRequest:
        nbytes = os.fstat(body).st_size
        try:
            answer = await worker.run(job, body, started=lambda: self._turns.begin(worker))
        except WorkerLost as error:
            if error.by_body:
                # How much it had read is lost with it.
                count_read(most_bytes(nbytes, job.encoding, self._settings.body_bytes))
            raise self._record(error) from None
        assert isinstance(answer.reply, (Prepared, Refused)), answer.reply
        count_read(answer.reply.read_bytes)
        self._turns.measured(worker, answer.reply.cpu_s)
        return _request(answer.reply, answer.files)

    def _record(self, error: WorkerLost) -> RequestError:
        _LOG.warning("%s; its request is refused", error)
        self._count_loss("timeout" if error.timed_out else "died")
        if error.timed_out:
            return RequestError(
                400,
                "body_too_complex",
                f"the body takes longer than {self._settings.job_s:g} s to read; "
                "send a shorter request",
            )
        if error.out_of_memory:
            return OUT_OF_MEMORY.request_error()
        return RequestError(
            503, "body_worker_lost", "the process that read the body ended unexpectedly"
        )


def _request(reply: Prepared | Refused, files: list[int]) -> PreparedRequest:
    try:
        if isinstance(reply, Refused):
            raise reply.error()
        (file,) = files
        return unpack(reply, file)
    finally:
        for file in files:
            os.close(file)


@asynccontextmanager
async def body_workers(
    settings: WorkerSettings,
    tenants: Tenants,
    clock: Clock,
    count_loss: Callable[[str], None],
) -> AsyncIterator[BodyWorkers]:
    """Workers that end with the block."""
    workers = BodyWorkers(settings, tenants, clock, count_loss=count_loss)
    try:
        yield workers
    finally:
        await workers.close()
