"""Paths, limits and the course of one request through the front."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas.clock import Clock
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import InputError
from prfaas.gateway.api.api_keys import Keyring, salt_of
from prfaas.gateway.api.body_limits import RETRY_S, BodyReader
from prfaas.gateway.api.error_responses import bad_input, error_response, of_http
from prfaas.gateway.api.metrics import ApiMetrics, RequestRecord
from prfaas.gateway.api.openapi import openapi
from prfaas.gateway.api.prompts import Prompts
from prfaas.gateway.api.request_log import accounting
from prfaas.gateway.api.request_schema import Reading, read_chat, read_completion, read_either
from prfaas.gateway.api.response_stream import ResponseStream
from prfaas.gateway.api.start_limiter import StartLimiter
from prfaas.gateway.request import Backend, GatewayRequest, RequestError, RequestTrace, StreamBroken
from prfaas.text import Chat, is_multimodal

_LOG = logging.getLogger(__name__)
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ID = web.RequestKey("id", str)
_TENANT = web.RequestKey("tenant", str)
_BEGUN = web.RequestKey("begun", bool)  # the status line is out: nothing else can be said
_OPEN = {"/health", "/metrics", "/openapi.json"}  # for probes and scrapers, which have no key

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Limits:
    max_in_flight: int
    stall_s: float


class GatewayApi:
    def __init__(
        self,
        model: str,
        max_tokens: int,
        backend: Backend,
        prompts: Prompts,
        keyring: Keyring,
        bodies: BodyReader,
        limits: Limits,
        metrics: ApiMetrics,
        clock: Clock,
    ) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._backend = backend
        self._prompts = prompts
        self._keyring = keyring
        self._bodies = bodies
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._turns = StartLimiter()
        self._in_flight = 0
        self._started_s = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._told])
        app.on_response_prepare.append(_name)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._one_model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/prfaas/v1/state", self._state)
        app.router.add_get("/prfaas/v1/plan", self._plan)
        app.router.add_post("/prfaas/v1/explain", self._explain)
        app.router.add_post("/prfaas/v1/register", self._register)
        return app

    @web.middleware
    async def _told(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Names the request, and puts whatever it fails with into OpenAI's shape."""
        sent = request.headers.get("X-Request-Id", "")
        request[_ID] = sent if _SANE_ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"
        try:
            if request.path not in _OPEN:
                request[_TENANT] = self._keyring.tenant(request.headers.get("Authorization"))
            return await handler(request)
        except RequestError as refusal:
            if refusal.status == 401:
                self._metrics.unauthorized.inc()
            return error_response(refusal)
        except InputError as error:
            return error_response(bad_input(error))
        except StreamBroken as error:
            return error_response(RequestError(502, "engine_lost", f"the engine was lost: {error}"))
        except web.HTTPException as error:
            return error_response(of_http(error))
        except ConnectionError:
            return web.Response()  # the client's: nobody is there to be told, nor is it an error
        except Exception:
            _LOG.exception("request %s", request[_ID])
            if _BEGUN in request:
                raise  # and the connection ends
            return error_response(RequestError(500, "internal_error", "the gateway failed"))

    # Generating -----------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, read_completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, read_chat)

    async def _generate(
        self, request: web.Request, read: Callable[[bytes], Reading]
    ) -> web.StreamResponse:
        story = RequestTrace(arrived_s=self._clock.now())
        account = RequestRecord(request[_ID], request.path, request[_TENANT], story)
        with accounting(account, self._metrics, self._clock):
            if self._in_flight >= self._limits.max_in_flight:
                raise RequestError(
                    429, "overloaded", "too many requests at once", retry_after_s=RETRY_S
                )
            self._in_flight += 1
            try:
                return await self._admitted(request, read, account)
            finally:
                self._in_flight -= 1

    async def _admitted(
        self, request: web.Request, read: Callable[[bytes], Reading], account: RequestRecord
    ) -> web.StreamResponse:
        async with self._bodies.read(request) as body:
            await self._turns.mine()
            reading = await self._prompts.read(read, body)
            ask = await self._ask(request, reading, len(body))
            del body
            account.prompt_tokens = len(ask.token_ids)
            relay = ResponseStream(
                request, shows_usage=reading.options.shows_usage, stall_s=self._limits.stall_s
            )
            try:
                async with self._backend.answer(ask, account.story) as upstream:
                    if ask.stream:
                        return await relay.stream(upstream)
                    return await relay.whole(upstream)
            finally:
                account.usage, account.cut_short = relay.usage, relay.cut_short
                account.delivered = relay.delivered

    async def _ask(self, request: web.Request, reading: Reading, nbytes: int) -> GatewayRequest:
        options = reading.options
        if options.model is not None and options.model != self._model:
            raise self._no_such_model(options.model)
        chat = reading.prompt if isinstance(reading.prompt, Chat) else None
        return GatewayRequest(
            id=request[_ID],
            path=reading.path,
            token_ids=await self._prompts.ids(reading, nbytes),
            fields=reading.fields,
            salt=salt_of(request[_TENANT], options.cache_salt or ""),
            stream=bool(options.stream),
            conversation=chat is not None,
            prompt_logprobs=reading.prompt_logprobs,
            multimodal=chat is not None and is_multimodal(chat.messages),
        )

    def _no_such_model(self, name: str) -> RequestError:
        return RequestError(
            404,
            "model_not_found",
            f"{name!r} is not served here; {self._model!r} is",
            param="model",
        )

    # About models and routes ----------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._model:
            raise self._no_such_model(name)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "prfaas",
            "max_model_len": self._max_tokens,
        }

    async def _state(self, request: web.Request) -> web.Response:
        return _json(self._backend.state())

    async def _plan(self, request: web.Request) -> web.Response:
        return _json(self._backend.plan())

    async def _explain(self, request: web.Request) -> web.Response:
        async with self._bodies.read(request) as body:
            ask = await self._ask(request, await self._prompts.read(read_either, body), len(body))
            return _json(self._backend.explain(ask))

    async def _register(self, request: web.Request) -> web.Response:
        async with self._bodies.read(request) as body:
            try:
                beat = msgspec.json.decode(body, type=Heartbeat)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(f"not a kvd's heartbeat: {error}") from None
        self._backend.register(beat)
        return _json({})

    # For operators --------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(
            body=openapi(with_keys=self._keyring.locked), content_type="application/json"
        )

    async def _metrics_page(self, request: web.Request) -> web.Response:
        self._metrics.body_bytes.set(self._bodies.held_bytes)
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    request[_BEGUN] = True
    if _ID in request:
        response.headers["X-Request-Id"] = request[_ID]


def _json(data: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")
