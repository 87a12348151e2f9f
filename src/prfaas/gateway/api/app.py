"""The HTTP application: its paths, its limits, and the course of one request through the API."""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import InputError, RequestError, StreamBroken
from prfaas.gateway.api.body_limits import BodyReader
from prfaas.gateway.api.content_encoding import too_large
from prfaas.gateway.api.credentials import REGISTER, GatewayCredentials
from prfaas.gateway.api.error_responses import bad_input, error_response, of_http
from prfaas.gateway.api.metrics import PromptRecord, RequestRecord
from prfaas.gateway.api.openapi import openapi
from prfaas.gateway.api.prompts import Prompts
from prfaas.gateway.api.request_log import RequestLog
from prfaas.gateway.api.request_preparation import PreparedRequest
from prfaas.gateway.api.request_schema import Kind, no_such_model
from prfaas.gateway.api.response_stream import ResponseStream
from prfaas.gateway.api.start_limiter import StartLimiter
from prfaas.gateway.api.tenants import AdmittedRequest, admit
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.peers.paths import DeploymentPaths
from prfaas.gateway.prompt_lists.fan_out import (
    PARALLEL_PROMPTS,
    FanOut,
    RoutedPrompt,
    answer_prompts,
)
from prfaas.gateway.prompt_lists.merging import AnswerMerger
from prfaas.gateway.request import Backend, GatewayRequest, Upstream
from prfaas.gateway.tenants import Tenants
from prfaas.gateway.tokenization import TOKENIZE_PATHS, TokenizationApi

_LOG = logging.getLogger(__name__)
CLUSTER_HEADER = "X-Prfaas-Cluster"  # names the PD cluster at which a request arrives
_HEARTBEAT_BYTES = 2 << 20  # as a gateway accepts of the report itself, when it polls a kvd
_TRACEBACK_CHARS = 8000  # an exception may quote the request
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ID = web.RequestKey("id", str)
_TENANT = web.RequestKey("tenant", str)
_BEGUN = web.RequestKey("begun", bool)  # the status line has been sent

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_tokens: int  # of prompt and answer together


@dataclass(frozen=True, slots=True)
class Limits:
    tenants: Tenants
    stall_s: float


class GatewayApi:
    def __init__(
        self,
        model: ServedModel,
        backend: Backend,
        prompts: Prompts,
        credentials: GatewayCredentials,
        body_reader: BodyReader,
        limits: Limits,
        request_log: RequestLog,
    ) -> None:
        self._model = model
        self._backend = backend
        self._prompts = prompts
        self._credentials = credentials
        self._body_reader = body_reader
        self._limits = limits
        self._request_log = request_log
        self._metrics = request_log.metrics
        self._start_limiter = StartLimiter()
        self._tokenization = TokenizationApi(prompts, body_reader, limits.tenants)
        self._started_s = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._handle_errors])
        app.on_response_prepare.append(_add_request_id)
        app.router.add_post("/v1/completions", partial(self._generate, "completion"))
        app.router.add_post("/v1/chat/completions", partial(self._generate, "chat"))
        for path in TOKENIZE_PATHS:
            app.router.add_post(path, self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._one_model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/prfaas/v1/state", self._state)
        app.router.add_get("/prfaas/v1/plan", self._plan)
        app.router.add_post("/prfaas/v1/explain", self._explain)
        app.router.add_post(REGISTER, self._register)
        DeploymentPaths(self._backend, self._body_reader).add_to(app)
        return app

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Sets the request's id, checks its key, and turns errors into OpenAI's error responses."""
        sent = request.headers.get("X-Request-Id", "")
        request[_ID] = sent if _VALID_ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"
        try:
            if isinstance(request.match_info.http_exception, web.HTTPMethodNotAllowed):
                raise request.match_info.http_exception  # no key would open it
            given = request.headers.get("Authorization")
            request[_TENANT] = self._credentials.admit(request.path, given)
            return await handler(request)
        except RequestError as error:
            if error.status == 401:
                self._metrics.unauthorized.inc()
            return error_response(error)
        except InputError as error:
            return error_response(bad_input(error))
        except StreamBroken as error:
            return error_response(
                RequestError(502, "engine_lost", f"the decode engine was lost: {error}")
            )
        except web.HTTPException as error:
            response = error_response(of_http(error))
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            return response
        except ConnectionError:
            return web.Response()  # the client has left: this response is not sent
        except Exception:
            _LOG.error("request %s: %s", request[_ID], traceback.format_exc()[-_TRACEBACK_CHARS:])
            if _BEGUN in request:
                raise  # aiohttp closes the connection
            return error_response(RequestError(500, "internal_error", "internal gateway error"))

    # Completions and chats ------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.Response:
        return await self._tokenization.answer(request, request[_TENANT])

    async def _generate(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        tenant = request[_TENANT]
        with (
            self._request_log.record(request[_ID], request.path, tenant) as record,
            admit(self._limits.tenants, tenant) as admitted,
        ):
            return await self._respond(request, kind, record, admitted)

    async def _respond(
        self,
        request: web.Request,
        kind: Kind,
        record: RequestRecord,
        admitted: AdmittedRequest,
    ) -> web.StreamResponse:
        admitted.check_body(request.content_length or 0)
        async with self._body_reader.read(request, admitted.add_bytes) as body:
            await self._start_limiter.wait()
            prepared = await self._prompts.prepare(kind, body, request[_TENANT])
            self._body_reader.replace(body, prepared.nbytes or body.nbytes)
            requests = self._gateway_requests(request, prepared)
            record.prompt_tokens = sum(len(each.token_ids) for each in requests)
            record.stream = prepared.stream
            several = len(requests) > 1
            parallel = admitted.add_prompts(len(requests), PARALLEL_PROMPTS)
            admitted.begin_wait(record.prompt_tokens)
            response = ResponseStream(
                request,
                shows_usage=prepared.shows_usage,
                stall_s=self._limits.stall_s,
                # The answers to several prompts are corrected one by one, when they are merged.
                cached_tokens=_unknown if several else record.trace.handed_off_cached,
            )
            del prepared
            send = response.stream if record.stream else response.whole
            try:
                if several:
                    async with self._answer_list(requests, record, admitted, parallel) as upstream:
                        return await send(upstream)
                async with self._backend.answer(requests[0], record.trace) as upstream:
                    admitted.end_wait()
                    return await send(upstream)
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
        prompts = [RoutedPrompt(each, self._request_log.new_trace()) for each in requests]
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

    def _gateway_requests(
        self, request: web.Request, prepared: PreparedRequest
    ) -> list[GatewayRequest]:
        """One for each prompt. Engines must not see two requests with the same id."""
        first, *others = prepared.prompts
        if not others:
            return [self._gateway_request(request, prepared, first, request[_ID])]
        return [
            self._gateway_request(request, prepared, token_ids, f"{request[_ID]}-{number}")
            for number, token_ids in enumerate(prepared.prompts)
        ]

    def _gateway_request(
        self, request: web.Request, prepared: PreparedRequest, token_ids: TokenIds, name: str
    ) -> GatewayRequest:
        return GatewayRequest(
            id=name,
            path=prepared.path,
            token_ids=token_ids,
            fields=prepared.fields,
            salt=self._credentials.salt(request[_TENANT], prepared.cache_salt),
            stream=prepared.stream,
            conversation=prepared.conversation,
            prompt_logprobs=prepared.prompt_logprobs,
            multimodal=prepared.multimodal,
            n=prepared.n,
            tenant=request[_TENANT],
            cluster=request.headers.get(CLUSTER_HEADER, ""),
        )

    # Models, state and routes ---------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._model.name:
            raise no_such_model(name, self._model.name)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "prfaas",
            "max_model_len": self._model.max_tokens,
        }

    async def _state(self, request: web.Request) -> web.Response:
        return _json(self._backend.state())

    async def _plan(self, request: web.Request) -> web.Response:
        return _json(self._backend.plan())

    async def _explain(self, request: web.Request) -> web.Response:
        # The cache of this tenant is the one that counts.
        request[_TENANT] = request.query.get("tenant", "")
        async with self._body_reader.read(request) as body:
            prepared = await self._prompts.prepare("either", body, request[_TENANT])
            explained, *others = self._gateway_requests(request, prepared)
            if others:
                raise InputError(
                    f"{len(others) + 1} prompts, which are routed one by one",
                    where="prompt",
                    fix="send one prompt",
                )
            return _json(self._backend.explain(explained))

    async def _register(self, request: web.Request) -> web.Response:
        async with self._body_reader.read(request, inline_bytes=_HEARTBEAT_BYTES) as body:
            if body.data is None:
                raise too_large(_HEARTBEAT_BYTES)
            try:
                heartbeat = msgspec.json.decode(body.data, type=Heartbeat)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(f"the body is not a heartbeat of a kvd: {error}") from None
        await self._backend.register(heartbeat)
        return _json({})

    # For operators --------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(
            body=openapi(with_keys=self._credentials.locked), content_type="application/json"
        )

    async def _metrics_page(self, request: web.Request) -> web.Response:
        self._metrics.body_bytes.set(self._body_reader.held_bytes)
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    request[_BEGUN] = True
    if _ID in request:
        response.headers["X-Request-Id"] = request[_ID]


def _unknown() -> None:
    return None


def _json(data: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")
