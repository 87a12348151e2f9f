"""The life of one request: placed, handed off, decoded, streamed; tried again while no token of it
has been sent (design: life of an offloaded request; paper, section 3.2).

A failed remote prefill goes to local prefill nodes, a dead decode node is replaced, within the
retry budget. Leaving the context ends everything that is still under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import msgspec

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock
from prfaas.errors import ConnectionLost, PeerError, PeerHttpError, RequestError
from prfaas.gateway.client.node_client import NodeClient, NodeResponse
from prfaas.gateway.dispatch.attempts import Attempts
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.dispatch.booking import Booking
from prfaas.gateway.dispatch.handoff import Failed, HandOff, Later, refused_by
from prfaas.gateway.dispatch.retry_budget import RetryBudget
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.gateway.router import PlacementRequest, Router
from prfaas.http_client.client import HttpClient
from prfaas.scheduler.request import Request

_LOG = logging.getLogger(__name__)
_LOST = 424  # of a decode node: the state is not there any more; the node is well
_LONG_TOKENS = 8_192  # hashing more takes the event loop's time: a thread does it


class Dispatcher:
    def __init__(
        self,
        router: Router,
        calls: HttpClient,
        errands: BackgroundCalls,
        moves: PrefixCopies,
        budget: RetryBudget,
        clock: Clock,
    ) -> None:
        self._router = router
        self._calls = calls
        self._errands = errands
        self._moves = moves
        self._budget = budget
        self._clock = clock
        self._ids = count()
        self._under_way: dict[int, asyncio.Task[Any] | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = False

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    @asynccontextmanager
    async def answer(self, ask: GatewayRequest, story: RequestTrace) -> AsyncIterator[NodeResponse]:
        """See `ask.Backend`."""
        if self._ended:
            raise RequestError(
                503, "shutting_down", "the gateway is shutting down", retry_after_s=1.0
            )
        self._budget.request()
        number = next(self._ids)
        self._under_way[number] = asyncio.current_task()
        self._idle.clear()
        try:
            prompt = await self._hashed(ask)
            request = request_of(ask, number, story.arrived_s)
            tries = Attempts(self._router, self._budget, self._clock, story)
            while True:
                seeker = PlacementRequest(request, prompt, tries.avoid)
                booking = await self._router.place(seeker, tries.patience_s())
                async with AsyncExitStack() as stack:
                    stack.callback(self._close, booking)
                    try:
                        answer = await self._attempt(stack, ask, prompt, booking, story)
                    except Failed as failure:
                        tries.failed(failure, booking)
                        if failure.unhandable:  # and stays so, whatever the next one fails of
                            request = request._replace(decode_only=True)
                    except Later as later:
                        tries.put_off(later)
                    else:
                        story.first_token_s = self._clock.now()
                        yield answer
                        self._observe(answer, story, prompt)
                        return
                await tries.rest()
        finally:
            del self._under_way[number]
            if not self._under_way:
                self._idle.set()

    async def end(self, patience_s: float) -> None:
        """Cancels the requests that are still under way, and returns when each of them has given
        back what it holds, or has started the call that does."""
        self._ended = True
        for task in self._under_way.values():
            if task is not None:
                task.cancel()
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            _LOG.warning("%d requests did not end within %g s", self.in_flight, patience_s)

    async def _hashed(self, ask: GatewayRequest) -> PromptHashes:
        sizes = self._router.block_sizes()

        def hashes() -> PromptHashes:
            prompt = PromptHashes(ask.token_ids.array, salt=ask.salt, adapter=ask.adapter)
            for size in sizes:
                prompt.at(size)
            return prompt

        if len(ask.token_ids) < _LONG_TOKENS:
            return hashes()
        return await asyncio.to_thread(hashes)

    async def _attempt(
        self,
        stack: AsyncExitStack,
        ask: GatewayRequest,
        prompt: PromptHashes,
        booking: Booking,
        story: RequestTrace,
    ) -> NodeResponse:
        route = booking.route
        story.attempts += 1
        story.routed_s = self._clock.now()
        story.granted_s = story.committed_s = None
        story.cluster, story.prefill, story.decode = route.cluster, route.prefill, route.decode
        story.offloaded, story.reason = route.offloaded, route.reason
        story.cached_tokens, story.nbytes = route.cached_tokens, route.nbytes
        prefill = self._router.members.named(route.prefill)
        decode = self._router.members.named(route.decode)
        if prefill is None or decode is None or decode.card is None or prefill.card is None:
            raise Failed("a node has just left", route.prefill, route.decode)
        # Its card is taken away while it does not answer, which may be any time from here on.
        model = decode.card.model
        transfer: dict[str, Any] = {}
        hand_off: HandOff | None = None
        if route.prefill != route.decode:
            hand_off = await stack.enter_async_context(
                HandOff(
                    self._router,
                    self._calls,
                    self._errands,
                    self._moves,
                    self._clock,
                    booking,
                    prefill,
                    decode,
                )
            )
            params = await hand_off.make(ask, prompt, story)
            transfer = {"kv_transfer_params": params}
        body = {
            **ask.fields,
            "model": model,
            **({"prompt": ask.token_ids.json()} if ask.path == "/v1/completions" else {}),
            **({"cache_salt": ask.salt} if ask.salt else {}),
            **transfer,
        }
        url = decode.engine_url
        if url is None:
            raise Failed("its engine has just left", route.decode)
        try:
            answer = await stack.enter_async_context(
                NodeClient(self._calls, url).answer(
                    ask.path,
                    msgspec.json.encode(body),
                    {"X-Request-Id": ask.id},
                    stream=ask.stream,
                    unless=partial(self._router.unless_silent, route.decode),
                )
            )
        except PeerError as error:
            if hand_off is not None and _renders_otherwise(ask, error):
                _LOG.warning(
                    "%s refused a chat that was handed to it (%s); a decode node gets it again, to "
                    "compute alone. Is [gateway] tokenizer the engines' own?",
                    route.decode,
                    error,
                )
                raise Failed(str(error), route.decode, unhandable=True) from None
            refused_by(error)
            if isinstance(error, ConnectionLost):
                self._router.engine_failed(route.decode)
            if isinstance(error, PeerHttpError) and error.status == _LOST:
                raise Failed(str(error), prefill=True) from None
            raise Failed(str(error), route.decode) from None
        if hand_off is None:
            booking.landed(self._clock.now())
        else:
            hand_off.taken = True
        return answer

    def _close(self, booking: Booking) -> None:
        booking.close(self._clock.now())

    def _observe(self, answer: NodeResponse, story: RequestTrace, prompt: PromptHashes) -> None:
        if answer.complete:
            cached = min(story.cached_tokens, prompt.tokens - 1)
            self._router.traffic.observe(
                self._clock.now(),
                prompt.tokens - cached,
                cached,
                max(1, answer.output_tokens),
                story.waited_s,
            )


def _renders_otherwise(ask: GatewayRequest, error: PeerError) -> bool:
    """Whether the engine may have made another prompt of the messages than the one that was
    prefilled. vLLM does not say why it failed; ours names a field that chats do not have."""
    if ask.path != "/v1/chat/completions" or not isinstance(error, PeerHttpError):
        return False
    return error.status == 500 or (error.status == 400 and error.param == "prompt")


def request_of(ask: GatewayRequest, number: int, arrived_s: float) -> Request:
    return Request(
        number,
        len(ask.token_ids),
        arrived_s,
        ask.prompt_logprobs,
        ask.adapter,
        ask.multimodal,
    )
