"""The HTTP application: its paths, its limits, and the course of one request through the API."""

from __future__ import annotations

import logging
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import InputError, RequestError, StreamBroken
from prfaas.gateway.api.body_limits import BodyReader
from prfaas.gateway.api.content_encoding import too_large
from prfaas.gateway.api.credentials import OPEN_PATHS, REGISTER, GatewayCredentials
from prfaas.gateway.api.error_responses import bad_input, error_response, of_http
from prfaas.gateway.api.openapi import openapi
from prfaas.gateway.api.prompts import Prompts
from prfaas.gateway.api.request_log import RequestLog
from prfaas.gateway.api.request_schema import Kind, no_such_model
from prfaas.gateway.following.paths import FollowingPaths
from prfaas.gateway.generation import GenerationApi, Limits, Sender
from prfaas.gateway.peers.paths import DeploymentPaths
from prfaas.gateway.request import Backend
from prfaas.gateway.tokenization import TOKENIZE_PATHS, TokenizationApi
from prfaas.security.own_host import OwnHost

_LOG = logging.getLogger(__name__)
_HEARTBEAT_BYTES = 2 << 20  # as a gateway accepts of the report itself, when it polls a kvd
_TRACEBACK_CHARS = 8000  # an exception may quote the request
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID = web.RequestKey("id", str)
_TENANT = web.RequestKey("tenant", str)
_BEGUN = web.RequestKey("begun", bool)  # the status line has been sent

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OtherPaths(Protocol):
    """Paths that have their own credentials, such as the console's."""

    def add_to(self, app: web.Application) -> None: ...

    def has(self, path: str) -> bool:
        """Whether the path is one of these, served or not."""

    def admit(self, request: web.Request) -> None:
        """Raises `RequestError` when the request has no credential for its path."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_tokens: int  # of prompt and answer together


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
        own_host: OwnHost | None = None,
    ) -> None:
        """`own_host` applies while tenants have no keys."""
        self._own_host = own_host
        self._model = model
        self._backend = backend
        self._credentials = credentials
        self._body_reader = body_reader
        self._metrics = request_log.metrics
        self._console: OtherPaths | None = None
        self.generation = GenerationApi(
            backend, prompts, credentials, body_reader, limits, request_log
        )
        self._tokenization = TokenizationApi(prompts, body_reader, limits.tenants, limits.stall_s)
        self._started_s = int(time.time())

    def application(
        self, console: OtherPaths | None = None, following: FollowingPaths | None = None
    ) -> web.Application:
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
        if following is not None:
            following.add_to(app)
        self._console = console
        if console is not None:
            console.add_to(app)
        return app

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Sets the request's id, checks its key, and turns errors into OpenAI's error responses."""
        sent = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = sent if VALID_ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"
        try:
            if isinstance(request.match_info.http_exception, web.HTTPMethodNotAllowed):
                raise request.match_info.http_exception  # no key would open it
            request[_TENANT] = self._admit(request)
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
            _LOG.error(
                "request %s: %s", request[REQUEST_ID], traceback.format_exc()[-_TRACEBACK_CHARS:]
            )
            if _BEGUN in request:
                raise  # aiohttp closes the connection
            return error_response(RequestError(500, "internal_error", "internal gateway error"))

    def _admit(self, request: web.Request) -> str:
        """The tenant of the request. Raises `RequestError`."""
        if self._console is not None and self._console.has(request.path):
            self._console.admit(request)
            return ""
        if self._own_host is not None and not self._credentials.locked:
            self._refuse_foreign(request, self._own_host)
        return self._credentials.admit(request.path, request.headers.get("Authorization"))

    def _refuse_foreign(self, request: web.Request, own_host: OwnHost) -> None:
        if request.path in OPEN_PATHS:
            return
        refusal = own_host.refusal(request.method, request.headers)
        if refusal is not None:
            raise RequestError(403, refusal.code, refusal.message)

    # Completions and chats ------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        return await self._tokenization.answer(request, request[_TENANT])

    async def _generate(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        return await self.generation.answer(request, _sender(request), kind)

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
        sender = Sender(request[REQUEST_ID], request.query.get("tenant", ""))
        async with self._body_reader.read(request) as body:
            return _json(await self.generation.explain(request, sender, body))

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
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def _sender(request: web.Request) -> Sender:
    return Sender(request[REQUEST_ID], request[_TENANT])


def _json(data: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")
