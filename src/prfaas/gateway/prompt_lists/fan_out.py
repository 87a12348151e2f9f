"""The routed requests of one list of prompts, under way, and their answers in order of arrival.

A failure of one prompt ends all of them: before the first byte the client gets its error, and
afterwards the stream breaks off. Leaving the block cancels what is still under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from prfaas.errors import RequestError, StreamBroken
from prfaas.gateway.prompt_lists.merging import AnswerMerger
from prfaas.gateway.request import Backend, GatewayRequest, RequestTrace, Upstream

# Prompts of one request that are under way at once. The others start when these end, so that one
# list does not take all places in the queues of its tenant.
PARALLEL_PROMPTS = 64
_MOST_BATCHES = 16  # that have arrived and were not read; the engines' streams then wait


class RoutedPrompt(NamedTuple):
    request: GatewayRequest
    trace: RequestTrace


class FanOut(NamedTuple):
    """How the prompts of one list are sent."""

    backend: Backend
    before_each: Callable[[], Awaitable[None]]  # awaited before a prompt is routed
    when_all_started: Callable[[], None]  # every prompt has its first token
    parallel: int = PARALLEL_PROMPTS


@asynccontextmanager
async def answer_prompts(
    fan_out: FanOut, prompts: Sequence[RoutedPrompt], merger: AnswerMerger
) -> AsyncIterator[Upstream]:
    """Entered when a prompt has its first token. Raises `RequestError` and `StreamBroken`."""
    arrivals = _Arrivals(len(prompts))
    slots = asyncio.Semaphore(fan_out.parallel)
    waiting = len(prompts)

    async def serve(number: int, prompt: RoutedPrompt) -> None:
        nonlocal waiting
        async with slots:
            await fan_out.before_each()
            async with fan_out.backend.answer(prompt.request, prompt.trace) as upstream:
                waiting -= 1
                if not waiting:
                    fan_out.when_all_started()
                async for batch in upstream.events():
                    await arrivals.put(_Batch(number, batch))

    tasks = [asyncio.create_task(serve(number, prompt)) for number, prompt in enumerate(prompts)]
    try:
        for task in tasks:
            task.add_done_callback(arrivals.end)
        await arrivals.wait()
        yield _Merged(arrivals, prompts, merger)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Batch(NamedTuple):
    prompt: int
    items: Sequence[bytes]


class _Arrivals:
    """Batches of all prompts, bounded, in order of arrival."""

    def __init__(self, prompts: int) -> None:
        self._left = prompts  # that have not ended
        self._batches: deque[_Batch] = deque()
        self._room = asyncio.Semaphore(_MOST_BATCHES)
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def put(self, batch: _Batch) -> None:
        await self._room.acquire()
        self._batches.append(batch)
        self._changed.set()

    def end(self, task: asyncio.Task[None]) -> None:
        """A prompt has ended. Its failure is the failure of all."""
        self._left -= 1
        failure = _shutting_down() if task.cancelled() else task.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
        self._changed.set()

    async def wait(self) -> None:
        """Returns when a batch has arrived, or all prompts have ended. Raises the first failure."""
        while self._failure is None and not self._batches and self._left:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def take(self) -> list[_Batch]:
        """All batches that have arrived."""
        taken = list(self._batches)
        self._batches.clear()
        for _ in taken:
            self._room.release()
        return taken


class _Merged:
    """The merged answer, an `Upstream`."""

    def __init__(
        self, arrivals: _Arrivals, prompts: Sequence[RoutedPrompt], merger: AnswerMerger
    ) -> None:
        self._arrivals = arrivals
        self._prompts = prompts
        self._merger = merger

    async def events(self) -> AsyncIterator[Sequence[bytes]]:
        stream = self._prompts[0].request.stream
        while batches := self._arrivals.take():
            shown = []
            for number, items in batches:
                cached_tokens = self._prompts[number].trace.handed_off_cached()
                if stream:
                    shown += self._merger.events(number, items, cached_tokens)
                else:
                    self._merger.add_body(number, b"".join(items), cached_tokens)
            if shown:
                yield shown
            try:
                await self._arrivals.wait()
            except RequestError as error:
                # The status line of a stream has been sent.
                raise StreamBroken(error.message) if stream else error from None
        yield self._merger.closing() if stream else [self._merger.body()]


def _shutting_down() -> RequestError:
    return RequestError(503, "shutting_down", "the gateway is shutting down", retry_after_s=1.0)
