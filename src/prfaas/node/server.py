"""A node's HTTP API: vLLM's paths and bodies over a `RequestRunner`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas import __version__
from prfaas.clock import MonotonicClock
from prfaas.contracts.trace_api import TRACE_PATH, ProcessSpans
from prfaas.engine.api import Engine, Finished, JobFailed, Prefilled, Token
from prfaas.errors import InputError, RequestError
from prfaas.node import errors
from prfaas.node.choices import RunningChoices
from prfaas.node.errors import request_error
from prfaas.node.metrics import NodeMetrics
from prfaas.node.openapi import OPEN_PATHS, openapi
from prfaas.node.request_reader import NodeModel, PlannedChoice, ReadRequest, RequestReader
from prfaas.node.request_runner import RequestRunner
from prfaas.node.request_schema import GenerationRequest
from prfaas.node.request_spans import RequestSpans
from prfaas.node.responses import DONE, error_piece, whole_response
from prfaas.node.served.fields import served_fields
from prfaas.security.own_host import OwnHost, Refusal, refuse_foreign
from prfaas.security.shared_key import SharedKey, require_key
from prfaas.service.probes import add_probes
from prfaas.service.request_body import DamagedBody, log_malformed_requests_briefly
from prfaas.service.stopping import Stopping
from prfaas.text.tokenization import detokenize, parse_detokenize, parse_tokenize, tokenize
from prfaas.tracing.context import TRACEPARENT
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.server_span import ServerSpan, server_span
from prfaas.tracing.spans import MODEL, NODE_REQUEST

_LOG = logging.getLogger(__name__)
_BEGUN = web.RequestKey("begun", bool)  # the status line of a stream has been sent


class NodeApi:
    def __init__(
        self,
        model: NodeModel,
        engine: Engine,
        runner: RequestRunner,
        metrics: NodeMetrics,
        stopping: Stopping | None = None,
        problem: Callable[[], str] = str,
        recorder: SpanRecorder | None = None,
    ) -> None:
        """`problem` says why the node is not ready; empty when it is."""
        self._model = model
        self._engine = engine
        self._runner = runner
        self._metrics = metrics
        self._reader = RequestReader(model, engine)
        self._stopping = stopping or Stopping()
        self._problem = problem
        self._recorder = recorder or SpanRecorder("node", MonotonicClock())
        self._document = b""

    def application(
        self,
        member: SharedKey | None = None,
        metrics: SharedKey | None = None,
        own_host: OwnHost | None = None,
    ) -> web.Application:
        """With a member key, every path except `OPEN_PATHS` requires it. The key `metrics` opens
        /metrics. `own_host` applies without a member key."""
        log_malformed_requests_briefly()
        checks = []
        if member is not None:
            checks.append(require_key(_unauthorized, member, metrics, OPEN_PATHS))
        elif own_host is not None:
            checks.append(refuse_foreign(own_host, _foreign, OPEN_PATHS))
        self._document = openapi(with_keys=member is not None)
        app = web.Application(middlewares=[*checks, _errors])
        app.on_cleanup.append(self._close)
        add_probes(app, "node", self._stopping, self._problem)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/version", self._version)
        app.router.add_get(TRACE_PATH, self._trace)
        return app

    async def start(self) -> None:
        """Before the first request, which would wait longer otherwise."""
        await self._reader.start()

    async def _close(self, app: web.Application) -> None:
        await self._reader.close()

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
                "compat": msgspec.to_builtins(self._engine.compat),
                "serves": served_fields(),
            },
        }
        return _json({"object": "list", "data": [card]})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        page = self._metrics.render(self._engine.stats, self._runner.preparing)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _trace(self, request: web.Request) -> web.Response:
        spans = self._recorder.spans_of(request.match_info["trace_id"])
        return _json(ProcessSpans(tuple(spans)))

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await self._reader.parsed(request, parse_tokenize)
        self._reader.check_model(asked.model)
        limit = self._engine.limits.max_tokens
        return _json(await asyncio.to_thread(tokenize, self._model.tokenizer, asked, limit))

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = await self._reader.parsed(request, parse_detokenize)
        self._reader.check_model(asked.model)
        return _json(await asyncio.to_thread(detokenize, self._model.tokenizer, asked))

    # Completions ----------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        with self._span(request) as span:
            reads = await self._reader.read_completion(request)
            return await self._generate(request, reads, span)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        with self._span(request) as span:
            read = await self._reader.read_chat(request)
            return await self._generate(request, [read], span)

    async def _render_completion(self, request: web.Request) -> web.Response:
        reads = await self._reader.read_completion(request)
        return _json([self._reader.render(read) for read in reads])

    async def _render_chat(self, request: web.Request) -> web.Response:
        return _json(self._reader.render(await self._reader.read_chat(request)))

    @contextmanager
    def _span(self, request: web.Request) -> Iterator[ServerSpan]:
        header = request.headers.get(TRACEPARENT)
        with server_span(self._recorder, NODE_REQUEST, header) as span:
            span.attributes[MODEL] = self._model.name
            yield span

    async def _generate(
        self, request: web.Request, reads: Sequence[ReadRequest], span: ServerSpan
    ) -> web.StreamResponse:
        """`reads`: one for each prompt."""
        asked, choices = reads[0].asked, self._reader.choices(reads)
        spans = RequestSpans(self._runner.start, self._recorder, span)
        running = RunningChoices(
            spans.start,
            [choice.request for choice in choices],
            continuations=asked.continuations,
            together=self._engine.limits.max_running,
        )
        try:
            # The status line waits for the prefill, so that an error until then is an HTTP status.
            await running.wait_until_computed()
            if asked.stream:
                return await self._stream(request, asked, running, choices)
            return await self._whole(running, choices)
        finally:
            spans.describe()
            running.abort()

    async def _show_prompt(
        self, event: Prefilled, choices: Sequence[PlannedChoice], index: int
    ) -> None:
        """Adds what the prefill has found out to the responses of this choice, and of the other
        continuations of its prompt, which start later."""
        read, _, builder = choices[index]
        builder.prefilled(event)
        if event.prompt_logprobs is not None:
            shown = await asyncio.to_thread(self._reader.shown_prompt, read, event.prompt_logprobs)
            for choice in choices[index : index + read.asked.continuations]:
                choice.builder.prompt_logprobs, choice.builder.prompt_entries = shown

    async def _whole(
        self, running: RunningChoices, choices: Sequence[PlannedChoice]
    ) -> web.Response:
        builders = [choice.builder for choice in choices]
        texts, unfinished = [""] * len(builders), len(builders)
        while unfinished:
            index, event = await running.next()
            builder = builders[index]
            match event:
                case Prefilled():
                    await self._show_prompt(event, choices, index)
                case Token():
                    texts[index] += builder.token(event)
                    if builder.finish_reason is not None:
                        running.stop(index)
                        unfinished -= 1
                case Finished():
                    texts[index] += builder.finished(event)
                    unfinished -= 1
                case JobFailed(error):
                    raise error
        return _json(whole_response(builders, texts))

    async def _stream(
        self,
        request: web.Request,
        asked: GenerationRequest,
        running: RunningChoices,
        choices: Sequence[PlannedChoice],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        try:
            request[_BEGUN] = True
            await response.prepare(request)
            await self._write(response, asked, running, choices)
        except ConnectionResetError:
            pass  # the client has disconnected, and the handler was not cancelled yet
        return response

    async def _write(
        self,
        response: web.StreamResponse,
        asked: GenerationRequest,
        running: RunningChoices,
        choices: Sequence[PlannedChoice],
    ) -> None:
        builders = [choice.builder for choice in choices]
        unfinished = len(builders)
        each_token = asked.return_token_ids or asked.logprobs_count is not None
        while unfinished:
            index, event = await running.next()
            builder = builders[index]
            match event:
                case Prefilled():
                    await self._show_prompt(event, choices, index)
                    if (opening := builder.opening()) is not None:
                        await response.write(opening)
                case Token():
                    text = builder.token(event)
                    ended = builder.finish_reason is not None
                    if text or ended or each_token:
                        await response.write(builder.piece(text))
                    if ended:
                        running.stop(index)
                        unfinished -= 1
                case Finished():
                    text = builder.finished(event)
                    await response.write(builder.piece(text))
                    unfinished -= 1
                case JobFailed(error):
                    failure = errors.of_job(error)
                    await response.write(error_piece(errors.error_body(failure)))
                    break
        if not unfinished and asked.stream_options is not None:
            if asked.stream_options.include_usage:
                await response.write(builders[0].usage_piece(builders))
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


def _foreign(refusal: Refusal) -> web.Response:
    problem = request_error("forbidden", refusal.message)
    return _json(errors.error_body(problem), status=problem.status)


def _json(
    data: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data),
        status=status,
        headers=headers,
        content_type="application/json",
    )
