"""Serves one request: places it, hands its state off, starts decoding, streams the answer, and
retries while no token has been sent (paper, section 3.2).

After a failed remote prefill the request goes to local prefill nodes; a dead decode node is
replaced; both within the retry budget. Leaving the context of an answer ends all calls that are
still under way for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock
from prfaas.contracts.kv_transfer_params import Remainder, encode
from prfaas.contracts.kvd_api import OTHER_PROMPT
from prfaas.errors import PeerError, PeerHttpError, RequestError
from prfaas.gateway.attempt_trace import begin_call
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.client.node_client import NodeClient, NodeResponse
from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.dispatch.attempts import Attempts, RetryBudget
from prfaas.gateway.dispatch.field_checks import FieldChecks, check_names
from prfaas.gateway.dispatch.handoff import (
    LONG_TOKENS,
    AttemptFailed,
    DecodeNodeFull,
    HandOff,
    HandOffs,
    raise_client_error,
    record_lost_engine,
)
from prfaas.gateway.dispatch.kept_out import KeptOut
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.liveness import FellSilent
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.homes.request_homes import RequestHomes
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.placement import PlacementRequest
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.gateway.router import Router
from prfaas.scheduler.options import most_computed_tokens
from prfaas.scheduler.request import Request
from prfaas.tracing.spans import LOST, NO_MEMORY, NO_STATE, SILENT
from prfaas.types import ClusterId

_LOG = logging.getLogger(__name__)
_LOST = 424  # of a decode node: the state is not there any more; the node is healthy


class Dispatcher:
    def __init__(
        self,
        router: Router,
        hand_offs: HandOffs,
        budget: RetryBudget,
        traffic: HomeTraffic,
        homes: RequestHomes,
        clock: Clock,
    ) -> None:
        self._router = router
        self._fleet = hand_offs.fleet
        self._http = hand_offs.http
        self._hand_offs = hand_offs
        self._field_checks = FieldChecks(hand_offs.fleet, hand_offs.http)
        self._budget = budget
        self._kept_out = KeptOut(clock)
        self.traffic = traffic
        self.homes = homes
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
    async def answer(
        self, request: GatewayRequest, trace: RequestTrace
    ) -> AsyncIterator[NodeResponse]:
        """See `request.Backend`."""
        if self._ended:
            raise RequestError(
                503, "shutting_down", "the gateway is shutting down", retry_after_s=1.0
            )
        self._budget.add_request(request.tenant_tag)
        number = next(self._ids)
        self._under_way[number] = asyncio.current_task()
        self._idle.clear()
        try:
            prompt = await self._hash_prompt(request)
            routed = routed_request(request, number, trace.arrived_s)
            home = self.homes.of(request, prompt)
            trace.home = home
            attempts = Attempts(
                request, self._fleet, self._budget, self._kept_out, self._clock, trace
            )
            await attempts.begin()
            while True:
                placement = PlacementRequest(
                    routed,
                    prompt,
                    attempts.avoid,
                    streams=request.stream,
                    sequences=request.n,
                    tenant=request.tenant,
                    home=home,
                    explains=trace.explains,
                    waits=trace.waits,
                )
                trace.asked_s = self._clock.now()
                booking = await self._router.place(placement, attempts.time_left_s())
                trace.explanation = placement.explanation
                trace.stateless_tokens = placement.stateless_tokens
                course = trace.begin_attempt(booking.route, self._clock.now(), placement.transfer_s)
                async with AsyncExitStack() as stack:
                    stack.callback(self._router.close, booking)
                    try:
                        answer = await self._attempt(stack, request, prompt, booking, trace)
                    except AttemptFailed as failure:
                        course.fail(str(failure), failure.kind, self._clock.now())
                        attempts.record_failure(failure, booking)
                        # Also for every later attempt.
                        if failure.decode_only:
                            routed = routed._replace(decode_only=True)
                        if failure.no_alone:
                            routed = routed._replace(no_alone=True)
                    except DecodeNodeFull as full:
                        course.fail(str(full), NO_MEMORY, self._clock.now())
                        attempts.record_full(full)
                    else:
                        trace.first_token_s = self._clock.now()
                        if course.decode is not None:
                            course.decode.answered_s = trace.first_token_s
                        yield answer
                        self._observe(answer, trace, prompt, home)
                        return
                await attempts.back_off()
        finally:
            del self._under_way[number]
            if not self._under_way:
                self._idle.set()

    async def end(self, patience_s: float) -> None:
        """Cancels the requests that are still under way, and returns when each of them has released
        what it holds, or has started the call that does."""
        self._ended = True
        for task in self._under_way.values():
            if task is not None:
                task.cancel()
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            _LOG.warning("%d requests did not end within %g s", self.in_flight, patience_s)

    async def _hash_prompt(self, request: GatewayRequest) -> PromptHashes:
        sizes = self._fleet.members.block_sizes()

        def hashes() -> PromptHashes:
            prompt = PromptHashes(
                request.token_ids.array, salt=request.salt, adapter=request.adapter
            )
            for size in sizes:
                prompt.at(size)
            return prompt

        if len(request.token_ids) < LONG_TOKENS:
            return hashes()
        return await asyncio.to_thread(hashes)

    async def _attempt(
        self,
        stack: AsyncExitStack,
        request: GatewayRequest,
        prompt: PromptHashes,
        booking: Booking,
        trace: RequestTrace,
    ) -> NodeResponse:
        """Hands the request's state off, if another node prefills it, and starts decoding."""
        route = booking.route
        prefill = self._fleet.members.named(route.prefill)
        decode = self._fleet.members.named(route.decode)
        if prefill is None or decode is None or decode.card is None or prefill.card is None:
            raise AttemptFailed(
                "a node has just left", route.prefill, route.decode, unsent=True, kind=LOST
            )
        # The card is removed while the node does not answer, at any time from here on.
        model = decode.card.model
        check_names(decode.card, request)
        transfer: dict[str, Any] = {}
        hand_off: HandOff | None = None
        if route.prefill != route.decode:
            await self._check_fields(decode, request, booking)
            hand_off = await stack.enter_async_context(
                self._hand_offs.start(booking, prefill, decode)
            )
            params = await hand_off.carry_out(request, prompt, trace)
            transfer = {"kv_transfer_params": params}
        bound: dict[str, Any] = {}
        if route.alone and not route.is_last_resort and decode.card.ours:
            # A vLLM bounds its chunks itself, and computes what it has lost of the prefix.
            chunk_tokens = self._router.rules.alone.chunk_tokens
            most = most_computed_tokens(prompt.tokens - route.cached_tokens, chunk_tokens)
            params = encode(Remainder(most, chunk_tokens))
            bound = {"kv_transfer_params": params}
        body = {
            **request.fields,
            "model": model,
            **({"prompt": request.token_ids.json()} if request.path == "/v1/completions" else {}),
            **({"cache_salt": request.salt} if request.salt else {}),
            **transfer,
            **bound,
        }
        url = decode.engine_url
        if url is None:
            raise AttemptFailed("its engine has just left", route.decode, kind=LOST)
        call = trace.course.decode = begin_call(trace.context, self._clock.now())
        headers = {**request.headers, **trace.context.headers_of(call.traceparent)}
        try:
            async with self._fleet.liveness.unless_silent(route.decode):
                answer = await stack.enter_async_context(
                    NodeClient(self._http, url, self._fleet.timeouts).answer(
                        request.path,
                        encode_body(body),
                        headers,
                        stream=request.stream,
                        unless=partial(self._fleet.liveness.cancel_when_hung, route.decode),
                    )
                )
        except FellSilent as error:
            raise AttemptFailed(
                str(error), route.decode, engine=route.decode, kind=SILENT
            ) from None
        except PeerError as error:
            if transfer and await self._is_of_another_prompt(request, error, decode, transfer):
                _LOG.warning(
                    "%s refused the state of a chat (%s); the request is retried without a "
                    "hand-off. Check that [gateway] tokenizer is the engines' tokenizer.",
                    route.decode,
                    error,
                )
                raise AttemptFailed(str(error), route.decode, decode_only=True) from None
            raise_client_error(error)
            lost = record_lost_engine(self._fleet, route.decode, error)
            unsent = lost.unsent and hand_off is None
            if isinstance(error, PeerHttpError) and error.status == _LOST:
                # It had less cached than the index claims, if it was to serve the request alone.
                raise AttemptFailed(
                    str(error), prefill=True, no_alone=route.alone, kind=NO_STATE
                ) from None
            engine = route.decode if lost.broke and not lost.unsent else None
            raise AttemptFailed(
                str(error), route.decode, unsent=unsent, lost=lost.if_broke, engine=engine
            ) from None
        if hand_off is None:
            # An answer that does not stream arrives as a whole.
            booking.landed(self._clock.now(), is_first_token=request.stream)
        else:
            hand_off.mark_taken()
        return answer

    async def _check_fields(
        self, decode: Member, request: GatewayRequest, booking: Booking
    ) -> None:
        node, meanwhile = booking.route.decode, partial(booking.unready, self._clock)
        try:
            async with self._fleet.liveness.unless_silent(node):
                has_waited = await self._field_checks.check(decode, request, meanwhile)
        except FellSilent as error:
            raise AttemptFailed(str(error), node, engine=node, kind=SILENT) from None
        if has_waited and not self._router.begins_soon(booking):
            why = "while the engine checked the request's fields, others came before it"
            raise AttemptFailed(why, again=True)

    async def _is_of_another_prompt(
        self,
        request: GatewayRequest,
        error: PeerError,
        decode: Member,
        transfer: Mapping[str, Any],
    ) -> bool:
        """Whether the engine has rendered the messages to another prompt than the one that was
        prefilled. It must be proven: the decode engine prefills such a request itself, and no
        other. `prfaas node` says so in its response, by a field that chats lack; a vLLM tells its
        kvd. A kvd that does not answer in time proves nothing."""
        if request.path != "/v1/chat/completions" or not isinstance(error, PeerHttpError):
            return False
        if error.status == 400:
            return error.param == "prompt"
        if error.status != 500:
            return False
        kvd = KvdClient(self._http, decode.kvd_url, self._fleet.timeouts)
        try:
            status = await kvd.transfer(transfer["kv_transfer_params"]["transfer_id"])
        except PeerError as unanswered:
            _LOG.info("the transfer of a failed chat: %s", unanswered)
            return False
        return status.state == "released" and status.reason == OTHER_PROMPT

    def _observe(
        self, answer: NodeResponse, trace: RequestTrace, prompt: PromptHashes, home: ClusterId
    ) -> None:
        if answer.complete:
            cached = min(trace.cached_tokens, prompt.tokens - 1)
            self.traffic.observe(
                home,
                self._clock.now(),
                prompt.tokens - cached,
                cached,
                max(1, answer.output_tokens),
                trace.waited_s,
            )


def routed_request(request: GatewayRequest, number: int, arrived_s: float) -> Request:
    """The request as the scheduler sees it."""
    return Request(
        number,
        len(request.token_ids),
        arrived_s,
        request.prompt_logprobs,
        request.adapter,
        request.multimodal,
    )
