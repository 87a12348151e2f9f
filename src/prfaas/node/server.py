"""A node's HTTP API: vLLM's paths and bodies over a `RequestRunner`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas import __version__
from prfaas.contracts.kv_transfer_params import RemoteDecode, ResponseParams, decode, encode
from prfaas.engine.api import Engine, Finished, JobFailed, Prefilled, Sampling, Token
from prfaas.errors import InputError, RequestError
from prfaas.node import errors
from prfaas.node.errors import request_error
from prfaas.node.job_builder import TokenizedRequest
from prfaas.node.metrics import NodeMetrics
from prfaas.node.openapi import OPEN_PATHS, openapi
from prfaas.node.request_runner import ActiveRequest, RequestRunner
from prfaas.node.request_schema import (
    DEFAULT_MAX_TOKENS,
    GenerationRequest,
    TokenizePrompt,
    check_values,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from prfaas.node.responses import CHAT, DONE, TEXT, ResponseBuilder, ResponseShape, error_piece
from prfaas.security.shared_key import SharedKey, require_key
from prfaas.service.probes import add_probes
from prfaas.service.request_body import (
    BodyLimits,
    DamagedBody,
    log_malformed_requests_briefly,
)
from prfaas.service.stopping import Stopping
from prfaas.text import AnswerText, Chat, ModelTokenizer

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
MAX_BODY_BYTES = 64 << 20  # a million token ids take about 8 MB as JSON
MAX_BODIES_BYTES = 512 << 20  # of bodies that are being read or parsed
BODY_S = 60.0  # for a body to arrive
_BEGUN = web.RequestKey("begun", bool)  # the status line of a stream has been sent


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The model that a node serves."""

    name: str
    tokenizer: ModelTokenizer | None  # None: the node takes token ids only
    kvd_url: str | None = None  # of this node's kvd, for gateways
    events: str | None = None  # endpoints of published and of replayed KV events
    replay: str | None = None

    def require_tokenizer(self) -> ModelTokenizer:
        if self.tokenizer is None:
            raise InputError(
                "this node has no tokenizer", where="prompt", fix="send a list of token ids"
            )
        return self.tokenizer


class NodeApi:
    def __init__(
        self,
        model: NodeModel,
        engine: Engine,
        runner: RequestRunner,
        metrics: NodeMetrics,
        stopping: Stopping | None = None,
        problem: Callable[[], str] = str,
    ) -> None:
        """`problem` says why the node is not ready; empty when it is."""
        self._model = model
        self._engine = engine
        self._runner = runner
        self._metrics = metrics
        self._stopping = stopping or Stopping()
        self._problem = problem
        self._bodies = BodyLimits(
            each_bytes=MAX_BODY_BYTES, all_bytes=MAX_BODIES_BYTES, within_s=BODY_S
        )
        self._document = b""

    def application(
        self, member: SharedKey | None = None, operator: SharedKey | None = None
    ) -> web.Application:
        """With a member key, every path except `OPEN_PATHS` requires it. The operator key opens
        /metrics."""
        log_malformed_requests_briefly()
        checks = []
        if member is not None:
            checks.append(require_key(_unauthorized, member, operator, OPEN_PATHS))
        self._document = openapi(with_keys=member is not None)
        app = web.Application(middlewares=[*checks, _errors])
        add_probes(app, "node", self._stopping, self._problem)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/version", self._version)
        return app

    # Status and tokenizer -------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        """Gateways send no new requests to a node that drains, but those that they have sent in the
        meantime are served: see `service.stopping`."""
        if self._stopping.begun or self._runner.draining:
            raise request_error("draining", "this node is shutting down")
        return web.Response()

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": __version__, "server": "prfaas"})

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._model.name,
            "object": "model",
            "owned_by": "prfaas",
            "max_model_len": self._engine.limits.max_tokens,
            "prfaas": {
                "kvd_url": self._model.kvd_url,
                "events": self._model.events,
                "replay": self._model.replay,
                "compat": msgspec.to_builtins(self._engine.compat),
            },
        }
        return _json({"object": "list", "data": [card]})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        page = self._metrics.render(self._engine.stats, self._runner.preparing)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await self._parsed(request, parse_tokenize)
        tokenizer = self._model.require_tokenizer()
        match asked:
            case Chat():
                ids = await self._encoded_chat(asked)
            case TokenizePrompt():
                ids = await asyncio.to_thread(
                    tokenizer.encode, asked.prompt, add_special_tokens=asked.add_special_tokens
                )
        limit = self._engine.limits.max_tokens
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids})

    # Completions ----------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = await self._parsed(request, parse_completion)
        self._check_model(asked)
        prompt = asked.only_prompt
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(
                self._model.require_tokenizer().encode,
                prompt,
                add_special_tokens=asked.add_special_tokens,
            )
        default_tokens = min(DEFAULT_MAX_TOKENS, self._rest_tokens(prompt))
        return await self._generate(request, asked, TEXT, prompt, asked.sampling(default_tokens))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        parsed = await self._parsed(request, parse_chat)
        asked = parsed.asked
        self._check_model(asked)
        prompt = await self._encoded_chat(parsed.chat)
        default_tokens = self._rest_tokens(prompt)
        return await self._generate(request, asked, CHAT, prompt, asked.sampling(default_tokens))

    async def _parsed(self, request: web.Request, parse: Callable[[bytes], T]) -> T:
        async with self._bodies.read(request) as body:
            check_values(body, self._engine.limits.max_tokens)
            return parse(body)

    async def _encoded_chat(self, chat: Chat) -> list[int]:
        tokenizer = self._model.require_tokenizer()
        try:
            return await asyncio.to_thread(tokenizer.encode_chat, chat)
        except RecursionError:
            raise InputError("the messages are nested too deeply", where="messages") from None

    def _rest_tokens(self, prompt: list[int]) -> int:
        """The default of max_tokens, as in vLLM: the rest of the model's context."""
        return max(1, self._engine.limits.max_tokens - len(prompt))

    def _check_model(self, asked: GenerationRequest) -> None:
        if asked.model is not None and asked.model != self._model.name:
            raise request_error(
                "model_not_found",
                f"this node serves {self._model.name!r}, not {asked.model[:100]!r}",
                param="model",
            )

    async def _generate(
        self,
        request: web.Request,
        asked: GenerationRequest,
        shape: ResponseShape,
        prompt: list[int],
        sampling: Sampling,
    ) -> web.StreamResponse:
        tokenized = TokenizedRequest(
            id=f"{shape.id_prefix}-{secrets.token_hex(12)}",
            prompt=prompt,
            sampling=sampling,
            salt=asked.cache_salt,
            transfer=decode(asked.kv_transfer_params, len(prompt)),
        )
        builder = self._response_builder(asked, shape, tokenized)
        active = self._runner.start(tokenized)
        try:
            # The status line waits for the prefill, so that an error until then is an HTTP status.
            first = await active.events.get()
            match first:
                case JobFailed(error):
                    raise error
                case Prefilled():
                    builder.prefilled(first)
            if asked.stream:
                return await self._stream(request, asked, active, builder)
            return await self._whole(active, builder)
        finally:
            active.cancel("abort")

    def _response_builder(
        self, asked: GenerationRequest, shape: ResponseShape, tokenized: TokenizedRequest
    ) -> ResponseBuilder:
        tokenizer = self._model.tokenizer if asked.detokenize else None
        if asked.stops and tokenizer is None:
            raise InputError(
                "stop strings need detokenised text", where="stop", fix="use stop_token_ids"
            )
        handed_off = None
        if isinstance(tokenized.transfer, RemoteDecode):
            handed_off = encode(
                ResponseParams(
                    transfer_id=tokenized.transfer.grant.transfer_id,
                    handoff_tokens=tokenized.transfer.handoff_tokens,
                )
            )
        return ResponseBuilder(
            shape=shape,
            id=tokenized.id,
            model=self._model.name,
            created_s=int(time.time()),
            prompt_tokens=len(tokenized.prompt),
            return_token_ids=asked.return_token_ids,
            answer=AnswerText(tokenizer.decode if tokenizer is not None else None, asked.stops),
            transfer=handed_off,
        )

    async def _whole(self, active: ActiveRequest, builder: ResponseBuilder) -> web.Response:
        text = ""
        while True:
            match await active.events.get():
                case Token(id=token):
                    text += builder.token(token)
                    if builder.finish_reason is not None:
                        active.cancel("stop")
                        return _json(builder.whole(text))
                case Finished() as finished:
                    text += builder.finished(finished)
                    return _json(builder.whole(text))
                case JobFailed(error):
                    raise error

    async def _stream(
        self,
        request: web.Request,
        asked: GenerationRequest,
        active: ActiveRequest,
        builder: ResponseBuilder,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        try:
            request[_BEGUN] = True
            await response.prepare(request)
            await self._write(response, asked, active, builder)
        except ConnectionResetError:
            pass  # the client has disconnected, and the handler was not cancelled yet
        return response

    async def _write(
        self,
        response: web.StreamResponse,
        asked: GenerationRequest,
        active: ActiveRequest,
        builder: ResponseBuilder,
    ) -> None:
        if (opening := builder.opening()) is not None:
            await response.write(opening)
        held: list[int] = []  # tokens whose text is not final yet
        while builder.finish_reason is None:
            match await active.events.get():
                case Token(id=token):
                    held.append(token)
                    text = builder.token(token)
                    ended = builder.finish_reason is not None
                    if text or ended or asked.return_token_ids:
                        await response.write(builder.piece(text, held))
                        held = []
                    if ended:
                        active.cancel("stop")
                case Finished() as finished:
                    text = builder.finished(finished)
                    await response.write(builder.piece(text, held))
                case JobFailed(error):
                    failure = errors.of_job(error)
                    await response.write(error_piece(errors.error_body(failure)))
                    break
        if builder.finish_reason is not None and asked.stream_options is not None:
            if asked.stream_options.include_usage:
                await response.write(builder.usage_piece())
        await response.write(DONE)
        await response.write_eof()


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    headers = {}
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except InputError as error:
        failure = errors.bad_input(error)
        if isinstance(error, DamagedBody):
            headers["Connection"] = "close"
    except RequestError as error:
        failure = error
    except web.HTTPMethodNotAllowed as error:
        failure = request_error("method_not_allowed", f"{request.method[:20]} is not served here")
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    except web.HTTPNotFound:
        failure = request_error("not_found", "this path is not served")
    except ConnectionError:
        return web.Response()  # the client has left: this response is not sent
    except Exception:
        if _BEGUN in request:
            raise  # aiohttp logs it and closes the connection
        _LOG.exception("%s %s", request.method, request.path)
        failure = request_error("internal_error", "this node failed; its log has the reason")
    if failure.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(failure.retry_after_s)))
    return _json(errors.error_body(failure), status=failure.status, headers=headers)


def _unauthorized() -> web.Response:
    problem = request_error("unauthorized", "this node requires the member key as a bearer token")
    headers = {"WWW-Authenticate": "Bearer"}
    return _json(errors.error_body(problem), status=problem.status, headers=headers)


def _json(
    data: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data),
        status=status,
        headers=headers,
        content_type="application/json",
    )
