"""The course of a completion or a chat through the API: read, tokenised, answered, and counted for
its tenant. Requests of clients and of the console's prompt box take the same course."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import web

from prfaas.errors import InputError
from prfaas.gateway.api.body_limits import BodyReader, RequestBody
from prfaas.gateway.api.credentials import GatewayCredentials
from prfaas.gateway.api.metrics import PromptRecord, RequestRecord
from prfaas.gateway.api.prompts import Prompts
from prfaas.gateway.api.request_log import RequestLog
from prfaas.gateway.api.request_preparation import PreparedRequest
from prfaas.gateway.api.request_schema import Kind
from prfaas.gateway.api.response_stream import ResponseStream
from prfaas.gateway.api.start_limiter import StartLimiter
from prfaas.gateway.api.tenants import AdmittedRequest, admit
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.prompt_lists.fan_out import (
    PARALLEL_PROMPTS,
    FanOut,
    RoutedPrompt,
    answer_prompts,
)
from prfaas.gateway.prompt_lists.merging import AnswerMerger
from prfaas.gateway.request import Backend, GatewayRequest, RequestTrace, Upstream
from prfaas.gateway.tenants import Tenants
from prfaas.tracing.context import TRACEPARENT, TRACESTATE, join_tracestate

CLUSTER_HEADER = "X-Prfaas-Cluster"  # names the PD cluster at which a request arrives


@dataclass(frozen=True, slots=True)
class Limits:
    tenants: Tenants
    stall_s: float


class Sender(NamedTuple):
    """Who sends a request, and under which id."""

    request_id: str
    tenant: str


class GenerationApi:
    def __init__(
        self,
        backend: Backend,
        prompts: Prompts,
        credentials: GatewayCredentials,
        body_reader: BodyReader,
        limits: Limits,
        request_log: RequestLog,
    ) -> None:
        self._backend = backend
        self._prompts = prompts
        self._credentials = credentials
        self._body_reader = body_reader
        self._limits = limits
        self._request_log = request_log
        self._start_limiter = StartLimiter()

    async def answer(self, request: web.Request, sender: Sender, kind: Kind) -> web.StreamResponse:
        """Answers the request that the client sends."""
        with (
            self._record(request, sender) as record,
            admit(self._limits.tenants, sender.tenant) as admitted,
        ):
            admitted.check_body(request.content_length or 0)
            async with self._body_reader.read(
                request, admitted.add_bytes, admitted.count_read
            ) as body:
                record.trace.read_s = self._request_log.now()
                return await self._respond(request, sender, kind, body, record, admitted)

    async def answer_prompt(
        self, request: web.Request, sender: Sender, completion: bytes
    ) -> web.StreamResponse:
        """Answers `completion`, the body of a completion that was made here, within the same limits
        as those of clients. Its route is explained, whatever else is."""
        with (
            self._record(request, sender) as record,
            admit(self._limits.tenants, sender.tenant) as admitted,
        ):
            record.trace.explains = True
            admitted.add_bytes(len(completion))
            with self._body_reader.hold(completion) as body:
                return await self._respond(request, sender, "completion", body, record, admitted)

    async def explain(
        self, request: web.Request, sender: Sender, body: RequestBody
    ) -> dict[str, Any]:
        """Where the request in the body would go now. The cache of the sender's tenant counts."""
        prepared = await self._prompts.prepare("either", body, sender.tenant, _uncharged)
        explained, *others = self._gateway_requests(request, sender, prepared)
        if others:
            raise InputError(
                f"{len(others) + 1} prompts, which are routed one by one",
                where="prompt",
                fix="send one prompt",
            )
        return self._backend.explain(explained)

    async def _respond(
        self,
        request: web.Request,
        sender: Sender,
        kind: Kind,
        body: RequestBody,
        record: RequestRecord,
        admitted: AdmittedRequest,
    ) -> web.StreamResponse:
        await self._start_limiter.wait()
        prepared = await self._prompts.prepare(kind, body, sender.tenant, admitted.count_read)
        record.trace.tokenized_s = self._request_log.now()
        self._body_reader.replace(body, prepared.nbytes or body.nbytes)
        requests = self._gateway_requests(request, sender, prepared)
        record.prompt_tokens = sum(len(each.token_ids) for each in requests)
        record.stream = prepared.stream
        several = len(requests) > 1
        parallel = admitted.add_sequences(len(requests), prepared.n, PARALLEL_PROMPTS)
        admitted.begin_wait(record.prompt_tokens, prepared.n)

        def first_event() -> None:
            record.trace.first_token_s = self._request_log.now()

        response = ResponseStream(
            request,
            shows_usage=prepared.shows_usage,
            stall_s=self._limits.stall_s,
            # The answers to several prompts are corrected one by one, when they are merged.
            cached_tokens=_unknown if several else record.trace.handed_off_cached,
            first_event=first_event,
        )
        del prepared
        try:
            answering: AbstractAsyncContextManager[Upstream]
            if several:
                answering = self._answer_list(requests, record, admitted, parallel)
            else:
                answering = self._backend.answer(requests[0], record.trace)
            with self._body_reader.counting_answer():
                async with answering as upstream:
                    if not several:  # a list says itself when its last prompt has been answered
                        admitted.end_wait()
                    if record.stream:
                        return await response.stream(upstream)
                    whole = await response.collect(upstream)
                del upstream  # with the parts of which the answer was made
                return await response.whole(whole)  # the engine serves others meanwhile
        finally:
            record.usage, record.cut_short = response.usage, response.cut_short
            record.delivered = response.delivered

    @asynccontextmanager
    async def _answer_list(
        self,
        requests: Sequence[GatewayRequest],
        record: RequestRecord,
        admitted: AdmittedRequest,
        parallel: int,
    ) -> AsyncIterator[Upstream]:
        """The merged answer to several prompts. The record gets the course of each of them."""
        now_s, context = self._request_log.now(), record.trace.context
        prompts = [RoutedPrompt(each, RequestTrace(now_s, context)) for each in requests]
        merger = AnswerMerger(len(prompts), requests[0].n)
        fan_out = FanOut(self._backend, self._start_limiter.wait, admitted.end_wait, parallel)
        try:
            async with answer_prompts(fan_out, prompts, merger) as upstream:
                yield upstream
        finally:
            record.trace.summarise([prompt.trace for prompt in prompts])
            record.prompts = [
                PromptRecord(prompt.trace, len(prompt.request.token_ids), merger.usage_of(number))
                for number, prompt in enumerate(prompts)
            ]

    def _record(
        self, request: web.Request, sender: Sender
    ) -> AbstractContextManager[RequestRecord]:
        return self._request_log.record(
            sender.request_id,
            request.path,
            sender.tenant,
            request.headers.get(TRACEPARENT),
            join_tracestate(request.headers.getall(TRACESTATE, ())),
        )

    def _gateway_requests(
        self, request: web.Request, sender: Sender, prepared: PreparedRequest
    ) -> list[GatewayRequest]:
        """One for each prompt. Engines must not see two requests with the same id."""
        first, *others = prepared.prompts
        if not others:
            return [self._gateway_request(request, sender, prepared, first)]
        return [
            self._gateway_request(
                request,
                sender._replace(request_id=f"{sender.request_id}-{number}"),
                prepared,
                token_ids,
            )
            for number, token_ids in enumerate(prepared.prompts)
        ]

    def _gateway_request(
        self, request: web.Request, sender: Sender, prepared: PreparedRequest, token_ids: TokenIds
    ) -> GatewayRequest:
        return GatewayRequest(
            id=sender.request_id,
            path=prepared.path,
            token_ids=token_ids,
            fields=prepared.fields,
            salt=self._credentials.salt(sender.tenant, prepared.cache_salt),
            stream=prepared.stream,
            conversation=prepared.conversation,
            prompt_logprobs=prepared.prompt_logprobs,
            multimodal=prepared.multimodal,
            n=prepared.n,
            tenant=sender.tenant,
            tenant_tag=self._tag(sender.tenant),
            cluster=request.headers.get(CLUSTER_HEADER, ""),
        )

    def _tag(self, tenant: str) -> str:
        """A tenant that is alone is not named: nothing need be kept free for others."""
        return self._credentials.tenant_tag(tenant) if self._limits.tenants.several else ""


def _unknown() -> None:
    return None


def _uncharged(nbytes: int) -> None:
    """An operator's request, which only names a tenant."""
