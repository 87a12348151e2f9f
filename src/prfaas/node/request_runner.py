"""Runs requests: each is a task of the node, from the start of its lease to the end of its lease.

The HTTP handler only reads events. When its client disconnects, the handler cancels the request.
The task ends the lease after the engine has stopped using its pages.

    start ──► lease (kvd) ──► engine job ──► prompt computed: lease committed or released ──► tokens
          ──► the handler has the end ──► the state of the answer is kept, by a thread of its own
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

from prfaas.clock import Clock
from prfaas.contracts.kv_transfer_params import RemoteDecode
from prfaas.engine.api import (
    Engine,
    EngineJob,
    Event,
    Finished,
    JobFailed,
    KeptAnswer,
    Prefilled,
    Token,
)
from prfaas.errors import PeerError, PrfaasError
from prfaas.node import errors
from prfaas.node.errors import request_error
from prfaas.node.job_builder import JobBuilder, PreparedJob, TokenizedRequest
from prfaas.node.metrics import NodeMetrics
from prfaas.types import NotNow

# Calls to the kvd are short; waiting for one must not delay other requests' tokens.
KVD_THREADS = 4
# Answers whose state waits to be kept. Further ones are not kept.
MAX_KEEPING = 16
MAX_KEEPING_BYTES = 1 << 30
RETRY_S = 1.0

Ending: TypeAlias = Finished | JobFailed
EmitEvent: TypeAlias = Callable[[Event], None]
P = ParamSpec("P")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class _Lost(NamedTuple):
    """The transfer of a hand-off has failed."""

    reason: str


class _Threads(NamedTuple):
    kvd: ThreadPoolExecutor
    answers: ThreadPoolExecutor  # one: requests that start must not wait for answers


class ActiveRequest:
    """A started request. It emits Prefilled, Tokens, then Finished or JobFailed. Times are on the
    runner's clock; None: the request has not come so far."""

    def __init__(
        self,
        request: TokenizedRequest,
        emit: EmitEvent,
        arrived_s: float,
        cancel_job: Callable[[str], None],
    ) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.emit = emit
        self.ended_by: Literal["stop", "abort"] | None = None
        self.over = False
        self.resumed_tokens = 0
        self.generated: list[int] = []
        self.leased_s: float | None = None  # the kvd has given the pages, or has none to give
        self.began_s: float | None = None  # the engine has taken the job from its queue
        self.computed_s: float | None = None  # the prompt
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._cancel_job = cancel_job

    def __repr__(self) -> str:
        half = (
            type(self.request.transfer).__name__ if self.request.transfer is not None else "plain"
        )
        return (
            f"{self.request.id} ({half}): {len(self.request.prompt)} prompt tokens, "
            f"{self.resumed_tokens} of them resumed from, {len(self.generated)} generated,"
        )

    def cancel(self, because: Literal["stop", "abort"]) -> None:
        """Ends the request soon. Does nothing when it has ended."""
        if not self.over and self.ended_by is None:
            self.ended_by = because
            self._cancel_job(self.request.id)


class RequestRunner:
    """Made by `open_request_runner`. Use it on its event loop."""

    def __init__(
        self,
        engine: Engine,
        builder: JobBuilder,
        metrics: NodeMetrics,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        threads: _Threads,
    ) -> None:
        self._engine = engine
        self._builder = builder
        self._metrics = metrics
        self._clock = clock
        self._tasks = tasks
        self._threads = threads
        self._active: set[ActiveRequest] = set()
        self._preparing = 0
        self._keeping: list[int] = []  # bytes of each answer
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def preparing(self) -> int:
        """Requests that wait for the kvd before they reach the engine."""
        return self._preparing

    def start(
        self, request: TokenizedRequest, emit: EmitEvent, *, is_part: bool = False
    ) -> ActiveRequest:
        """Calls `emit` on the event loop. `is_part`: the request is a part of one that has begun,
        so that a node that drains still takes it."""
        if self.draining and not (is_part and self._active):
            raise request_error("draining", "this node is shutting down", retry_after_s=RETRY_S)
        active = ActiveRequest(request, emit, self._clock.now(), self._engine.cancel)
        self._active.add(active)
        self._idle.clear()
        self._tasks.create_task(self._serve(active))
        return active

    async def drain(self, patience_s: float) -> None:
        """Refuses new requests and returns when the last one has ended. Cancels the remaining ones
        after `patience_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            _LOG.warning("draining took too long: cancelling %d requests", len(self._active))
            for active in self._active:
                active.cancel("abort")
            await self._idle.wait()

    # One request ----------------------------------------------------------------------------------

    async def _serve(self, active: ActiveRequest) -> None:
        job: EngineJob | None = None
        answer: KeptAnswer | None = None
        try:
            ending, job = await self._answer(active)
            if isinstance(ending, Finished):
                answer, ending = ending.answer, Finished(ending.reason)
        except PrfaasError as error:
            ending = JobFailed(error)
        except Exception as error:  # a bug ends this request, not the node
            _LOG.exception("request %s", active.request.id)
            ending = JobFailed(error)
        if isinstance(ending, JobFailed):
            failure = errors.of_job(ending.error)
            self._metrics.failed(failure.code)
            ending = JobFailed(failure)
        else:
            self._metrics.succeeded(active.ended_by or ending.reason)
            if ending.reason == "cancelled":  # the handler must not take it for complete
                ending = JobFailed(
                    request_error("draining", "cancelled: this node is shutting down")
                )
        active.over = True
        _LOG.info("%s %s", active, ending)
        active.emit(ending)
        try:
            if job is not None and answer is not None and not self.draining:
                await self._keep(active, job, answer)
        except Exception:  # a bug costs this answer, not the node
            _LOG.exception("request %s: the answer was not kept", active.request.id)
        self._active.discard(active)
        if not self._active:
            self._idle.set()

    async def _keep(self, active: ActiveRequest, job: EngineJob, answer: KeptAnswer) -> None:
        """The client has the whole answer by now."""
        request, kept = active.request, False
        waiting, nbytes = self._keeping, answer.nbytes
        if len(waiting) < MAX_KEEPING and sum(waiting) + nbytes <= MAX_KEEPING_BYTES:
            waiting.append(nbytes)
            try:
                kept = await asyncio.get_running_loop().run_in_executor(
                    self._threads.answers,
                    lambda: self._builder.keep(request, active.generated, job, answer),
                )
            finally:
                waiting.remove(nbytes)
        if kept:
            self._metrics.kept_answers.inc()
        else:
            self._metrics.unkept_answers.inc()

    async def _answer(self, active: ActiveRequest) -> tuple[Ending, EngineJob | None]:
        request = active.request
        self._preparing += 1
        try:
            prepared = await self._in_thread(self._builder.prepare, request)
        finally:
            self._preparing -= 1
        active.leased_s = self._clock.now()
        if prepared.hashes and prepared.lease is None:
            self._metrics.unpooled.inc()
        inbox: asyncio.Queue[Event | _Lost] = asyncio.Queue()
        try:
            if active.ended_by is not None:
                return Finished("cancelled"), None
            self._submit(active, prepared, inbox)
            return await self._pass_on(active, prepared, inbox), prepared.job
        finally:
            await self._in_thread(prepared.end)

    def _submit(
        self, active: ActiveRequest, prepared: PreparedJob, inbox: asyncio.Queue[Event | _Lost]
    ) -> None:
        loop = asyncio.get_running_loop()

        def from_thread(event: Event | _Lost) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        if prepared.job is None:
            inbox.put_nowait(Prefilled(prepared.resumed_tokens, 0, 0))
            inbox.put_nowait(Finished("length"))
            return

        def on_begin() -> None:
            active.began_s = self._clock.now()

        refused = self._engine.submit(replace(prepared.job, on_begin=on_begin), from_thread)
        if isinstance(refused, NotNow):
            raise errors.not_now(refused)
        if isinstance(active.request.transfer, RemoteDecode):
            prepared.on_transfer_lost(lambda error: from_thread(_Lost(str(error))))

    async def _pass_on(
        self, active: ActiveRequest, prepared: PreparedJob, inbox: asyncio.Queue[Event | _Lost]
    ) -> Ending:
        last_s = active.arrived_s
        while True:
            event = await inbox.get()
            match event:
                case Finished() | JobFailed():
                    return event
                case _Lost(reason):
                    # This prefill is useless now. The engine must stop using the pages first.
                    self._engine.cancel(active.request.id)
                    while not isinstance(await inbox.get(), Finished | JobFailed):
                        pass
                    return JobFailed(request_error("transfer_lost", reason))
                case Prefilled():
                    active.computed_s = self._clock.now()
                    await self._computed(active, prepared)
                    self._count_prompt(prepared, event)
                    active.resumed_tokens = event.resumed_tokens
                case Token():
                    now = self._clock.now()
                    first = not active.generated
                    histogram = self._metrics.ttft_s if first else self._metrics.step_s
                    histogram.observe(now - last_s)
                    self._metrics.generation_tokens.inc()
                    active.generated.append(event.id)
                    active.first_token_s = now if first else active.first_token_s
                    active.last_token_s = last_s = now
            active.emit(event)

    async def _computed(self, active: ActiveRequest, prepared: PreparedJob) -> None:
        try:
            await self._in_thread(prepared.computed)
        except PeerError as error:
            if isinstance(active.request.transfer, RemoteDecode):
                raise request_error("transfer_lost", str(error)) from error
            _LOG.warning("the prefix was not kept: %s", error)

    def _count_prompt(self, prepared: PreparedJob, event: Prefilled) -> None:
        external = prepared.external_tokens
        local = event.resumed_tokens - external
        self._metrics.computed(computed=event.computed_tokens, local=local, external=external)
        self._metrics.exported_bytes.inc(event.exported_bytes)
        prompt_tokens = event.resumed_tokens + event.computed_tokens
        if external:
            self._metrics.external_queries.inc(prompt_tokens)
            self._metrics.external_hits.inc(external)
        else:
            self._metrics.queries.inc(prompt_tokens)
            self._metrics.hits.inc(local)

    async def _in_thread(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads.kvd, lambda: call(*arguments, **named))


@asynccontextmanager
async def open_request_runner(
    engine: Engine, builder: JobBuilder, metrics: NodeMetrics, clock: Clock
) -> AsyncIterator[RequestRunner]:
    """On exit, the remaining requests are cancelled and their leases have ended."""
    with (
        ThreadPoolExecutor(KVD_THREADS, thread_name_prefix="prfaas-kvd-calls") as calls,
        ThreadPoolExecutor(1, thread_name_prefix="prfaas-answers") as answers,
    ):
        threads = _Threads(calls, answers)
        async with asyncio.TaskGroup() as tasks:
            server = RequestRunner(engine, builder, metrics, clock, tasks, threads)
            try:
                yield server
            finally:
                await server.drain(0.0)
