"""Requests under way: each is a task of the node's own, from its lease to its lease's end.

The HTTP handler only listens. When its client goes away it cancels and leaves; pages are given back
here, after the engine has let go of them, whatever became of the connection.

    start ──► lease (kvd) ──► engine job ──► prompt computed: lease committed or released ──► tokens
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

from prfaas.clock import Clock
from prfaas.engine.api import Engine, Event, Failed, Finished, Prefilled, Token
from prfaas.errors import PeerError, PrfaasError
from prfaas.node import errors
from prfaas.node.errors import request_error
from prfaas.node.job_builder import JobBuilder, Prepared, Work
from prfaas.node.metrics import NodeMetrics
from prfaas.node.request_schema import RemoteDecode
from prfaas.types import BlockHash, NotNow

# Calls to the kvd are short; waiting for one must not hold up the others' tokens.
KVD_THREADS = 4
RETRY_S = 1.0

Ending: TypeAlias = Finished | Failed
OnPrompt: TypeAlias = Callable[[Sequence[int], Sequence[BlockHash], str], None]
P = ParamSpec("P")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class _Lost(NamedTuple):
    """The receiver of a hand-off will not have it."""

    reason: str


class Ongoing:
    """One request, as its listener sees it: Prefilled, Tokens, then Finished or Failed."""

    def __init__(self, work: Work, arrived_s: float, cancel_job: Callable[[str], None]) -> None:
        self.work = work
        self.arrived_s = arrived_s
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.ended_by: Literal["stop", "abort"] | None = None
        self.over = False
        self.resumed_tokens = 0
        self.generated_tokens = 0
        self._cancel_job = cancel_job

    def __repr__(self) -> str:
        half = type(self.work.transfer).__name__ if self.work.transfer is not None else "plain"
        return (
            f"{self.work.id} ({half}): {len(self.work.prompt)} prompt tokens, "
            f"{self.resumed_tokens} of them resumed from, {self.generated_tokens} generated,"
        )

    def cancel(self, because: Literal["stop", "abort"]) -> None:
        """Ends it soon; nothing when it has ended."""
        if not self.over and self.ended_by is None:
            self.ended_by = because
            self._cancel_job(self.work.id)


class RequestRunner:
    """Made by `serving`. To be used on its loop."""

    def __init__(
        self,
        engine: Engine,
        pooling: JobBuilder,
        metrics: NodeMetrics,
        clock: Clock,
        on_prompt: OnPrompt,
        tasks: asyncio.TaskGroup,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._engine = engine
        self._pooling = pooling
        self._metrics = metrics
        self._clock = clock
        self._on_prompt = on_prompt
        self._tasks = tasks
        self._threads = threads
        self._ongoing: set[Ongoing] = set()
        self._preparing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def preparing(self) -> int:
        """Requests the engine does not know yet."""
        return self._preparing

    def start(self, work: Work) -> Ongoing:
        if self.draining:
            raise request_error("draining", "this node is shutting down", retry_after_s=RETRY_S)
        ongoing = Ongoing(work, self._clock.now(), self._engine.cancel)
        self._ongoing.add(ongoing)
        self._idle.clear()
        self._tasks.create_task(self._serve(ongoing))
        return ongoing

    async def drain(self, patience_s: float) -> None:
        """No new requests; returns when the last has ended, or has been cancelled after that."""
        self.draining = True
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            _LOG.warning("%d requests are cut off", len(self._ongoing))
            for ongoing in self._ongoing:
                ongoing.cancel("abort")
            await self._idle.wait()

    # One request ----------------------------------------------------------------------------------

    async def _serve(self, ongoing: Ongoing) -> None:
        try:
            ending = await self._answer(ongoing)
        except PrfaasError as error:
            ending = Failed(error)
        except Exception as error:  # a fault of ours ends this request, not the node
            _LOG.exception("request %s", ongoing.work.id)
            ending = Failed(error)
        if isinstance(ending, Failed):
            failure = errors.of_job(ending.error)
            self._metrics.failed(failure.code)
            ending = Failed(failure)
        else:
            self._metrics.succeeded(ongoing.ended_by or ending.reason)
            if ending.reason == "cancelled":  # whoever still listens must not take it for complete
                ending = Failed(request_error("draining", "cut off: this node is shutting down"))
        ongoing.over = True
        _LOG.info("%s %s", ongoing, ending)
        ongoing.events.put_nowait(ending)
        self._ongoing.discard(ongoing)
        if not self._ongoing:
            self._idle.set()

    async def _answer(self, ongoing: Ongoing) -> Ending:
        work = ongoing.work
        self._preparing += 1
        try:
            prepared = await self._in_thread(self._pooling.prepare, work)
        finally:
            self._preparing -= 1
        self._on_prompt(work.prompt, prepared.hashes, work.salt)
        if prepared.hashes and prepared.lease is None:
            self._metrics.unpooled.inc()
        inbox: asyncio.Queue[Event | _Lost] = asyncio.Queue()
        try:
            if ongoing.ended_by is not None:
                return Finished("cancelled")
            self._submit(ongoing, prepared, inbox)
            return await self._pass_on(ongoing, prepared, inbox)
        finally:
            await self._in_thread(prepared.end)

    def _submit(
        self, ongoing: Ongoing, prepared: Prepared, inbox: asyncio.Queue[Event | _Lost]
    ) -> None:
        loop = asyncio.get_running_loop()

        def from_thread(event: Event | _Lost) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        if prepared.job is None:
            inbox.put_nowait(Prefilled(prepared.resumed_tokens, 0, 0))
            inbox.put_nowait(Finished("length"))
            return
        refused = self._engine.submit(prepared.job, from_thread)
        if isinstance(refused, NotNow):
            raise errors.not_now(refused)
        if isinstance(ongoing.work.transfer, RemoteDecode):
            prepared.on_transfer_lost(lambda error: from_thread(_Lost(str(error))))

    async def _pass_on(
        self, ongoing: Ongoing, prepared: Prepared, inbox: asyncio.Queue[Event | _Lost]
    ) -> Ending:
        last_s = ongoing.arrived_s
        while True:
            event = await inbox.get()
            match event:
                case Finished() | Failed():
                    return event
                case _Lost(reason):
                    # Nobody waits for this prefill any more. The engine lets go of the pages first.
                    self._engine.cancel(ongoing.work.id)
                    while not isinstance(await inbox.get(), Finished | Failed):
                        pass
                    return Failed(request_error("transfer_lost", reason))
                case Prefilled():
                    await self._computed(ongoing, prepared)
                    self._count_prompt(prepared, event)
                    ongoing.resumed_tokens = event.resumed_tokens
                case Token():
                    now = self._clock.now()
                    first = ongoing.generated_tokens == 0
                    histogram = self._metrics.ttft_s if first else self._metrics.step_s
                    histogram.observe(now - last_s)
                    self._metrics.generation_tokens.inc()
                    ongoing.generated_tokens += 1
                    last_s = now
            ongoing.events.put_nowait(event)

    async def _computed(self, ongoing: Ongoing, prepared: Prepared) -> None:
        try:
            await self._in_thread(prepared.computed)
        except PeerError as error:
            if isinstance(ongoing.work.transfer, RemoteDecode):
                raise request_error("transfer_lost", str(error)) from error
            _LOG.warning("a prefix was not kept: %s", error)

    def _count_prompt(self, prepared: Prepared, event: Prefilled) -> None:
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
        return await loop.run_in_executor(self._threads, lambda: call(*arguments, **named))


@asynccontextmanager
async def serving(
    engine: Engine, pooling: JobBuilder, metrics: NodeMetrics, clock: Clock, on_prompt: OnPrompt
) -> AsyncIterator[RequestRunner]:
    """`on_prompt` hears every prompt and its blocks' names. On leaving, what is still under way has
    been cancelled and has given its pages back."""
    with ThreadPoolExecutor(KVD_THREADS, thread_name_prefix="prfaas-kvd-calls") as threads:
        async with asyncio.TaskGroup() as tasks:
            server = RequestRunner(engine, pooling, metrics, clock, on_prompt, tasks, threads)
            try:
                yield server
            finally:
                await server.drain(0.0)
