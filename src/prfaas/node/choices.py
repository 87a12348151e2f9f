"""The choices of one request: each continuation of each prompt is a request of the runner.

    prompt 0   first continuation: computes the prompt ──► the other ones resume from the pool
    prompt 1   first continuation ...

Without a kvd, each continuation computes the prompt. The continuations of a hand-off all start at
once, because each of them attaches the transfer. A failure of one choice fails the request, which
the caller sees to. Use it on the event loop of the runner.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from prfaas.contracts.kv_transfer_params import RemotePrefill
from prfaas.engine.api import Event, Finished, JobFailed, Prefilled, Sampling
from prfaas.errors import RequestError
from prfaas.node.job_builder import TokenizedRequest
from prfaas.node.request_runner import ActiveRequest, EmitEvent

_RANDOM_SEED = -1  # as None, in vLLM
_SEED_MINUS_ONE = 2**64 - 1  # what torch makes of -1 where it is a seed


class StartRequest(Protocol):
    """`RequestRunner.start`."""

    def __call__(
        self, request: TokenizedRequest, emit: EmitEvent, *, is_part: bool = False
    ) -> ActiveRequest: ...


class ChoiceEvent(NamedTuple):
    choice: int  # its index
    event: Event


def continuation_sampling(sampling: Sampling, continuation: int) -> Sampling:
    """Each continuation of a seeded request has a seed of its own, as in vLLM."""
    if not continuation or sampling.seed is None or sampling.seed == _RANDOM_SEED:
        return sampling
    seed = sampling.seed + continuation
    return replace(sampling, seed=_SEED_MINUS_ONE if seed == _RANDOM_SEED else seed)


class RunningChoices:
    def __init__(
        self,
        start: StartRequest,
        requests: Sequence[TokenizedRequest],
        *,
        continuations: int,
        together: int,
    ) -> None:
        """`requests`: prompt by prompt, its `continuations` one after another. At most `together`
        of them run at the same time, so that one request does not fill the engine's queue. Raises
        what `start` raises."""
        self._start = start
        self._requests = requests
        self._continuations = continuations
        self._events: asyncio.Queue[ChoiceEvent] = asyncio.Queue()
        self._active: dict[int, ActiveRequest] = {}
        self._stopped: set[int] = set()
        self._first: ChoiceEvent | None = None
        self._at_once = isinstance(requests[0].transfer, RemotePrefill)
        self._together = len(requests) if self._at_once else together
        step = 1 if self._at_once else continuations
        self._ready = deque(range(0, len(requests), step))  # that wait for others to end
        self._begin(self._ready.popleft(), is_part=False)
        self._begin_ready()

    async def wait_until_computed(self) -> None:
        """Returns when the first prompt is computed. Raises the error when a choice has failed
        before."""
        self._first = await self.next()
        if isinstance(self._first.event, JobFailed):
            raise self._first.event.error

    async def next(self) -> ChoiceEvent:
        """The next event of a choice that has not been stopped."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while True:
            index, event = await self._events.get()
            match event:
                case Finished() | JobFailed():
                    del self._active[index]
                case Prefilled() if not self._at_once and index % self._continuations == 0:
                    # Before other prompts, while the pool has the state of this one.
                    siblings = range(index + 1, index + self._continuations)
                    self._ready.extendleft(reversed(siblings))
            try:
                self._begin_ready()
            except RequestError as error:
                return ChoiceEvent(index, JobFailed(error))
            if index not in self._stopped:
                return ChoiceEvent(index, event)

    def stop(self, index: int) -> None:
        """The answer of the choice is complete. The other choices continue."""
        self._stopped.add(index)
        if (active := self._active.get(index)) is not None:
            active.cancel("stop")

    def abort(self) -> None:
        """Ends all choices soon. Does nothing to those that have ended."""
        self._ready.clear()
        for active in self._active.values():
            active.cancel("abort")

    def _begin_ready(self) -> None:
        while self._ready and len(self._active) < self._together:
            self._begin(self._ready.popleft(), is_part=True)

    def _begin(self, index: int, *, is_part: bool) -> None:
        def emit(event: Event) -> None:
            self._events.put_nowait(ChoiceEvent(index, event))

        self._active[index] = self._start(self._requests[index], emit, is_part=is_part)
