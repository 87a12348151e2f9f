"""The HTTP surface of a node: vLLM's paths and shapes over the requests of `serving`."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas import __version__
from prfaas.engine.api import Engine, Failed, Finished, Prefilled, Sampling, Token
from prfaas.errors import InputError, RequestError
from prfaas.node import errors
from prfaas.node.errors import request_error
from prfaas.node.job_builder import Work
from prfaas.node.metrics import NodeMetrics
from prfaas.node.request_runner import Ongoing, RequestRunner
from prfaas.node.request_schema import (
    DEFAULT_MAX_TOKENS,
    Generation,
    RemoteDecode,
    chat_of,
    parse_chat,
    parse_completion,
    transfer_of,
)
from prfaas.node.responses import CHAT, DONE, TEXT, Account, Shape, error_piece
from prfaas.text import AnswerText, ModelTokenizer

MAX_BODY_BYTES = 64 << 20  # a million token ids as JSON are some 8 MB


@dataclass(frozen=True, slots=True)
class Model:
    """What is served, under which name."""

    name: str
    words: ModelTokenizer | None  # None: token ids only
    kvd_url: str | None = None  # where a gateway finds this node's kvd
    events: str | None = None  # where KV events are published, and where they are replayed
    replay: str | None = None

    def speaking(self) -> ModelTokenizer:
        if self.words is None:
            raise InputError(
                "this node has no tokenizer", where="prompt", fix="send a list of token ids"
            )
        return self.words


class Surface:
    def __init__(
        self, model: Model, engine: Engine, serving: RequestRunner, metrics: NodeMetrics
    ) -> None:
        self._model = model
        self._engine = engine
        self._serving = serving
        self._metrics = metrics

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/version", self._version)
        return app

    # Small ones -----------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        if self._serving.draining:
            raise request_error("draining", "this node is shutting down")
        return web.Response()

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
        page = self._metrics.render(self._engine.stats, self._serving.preparing)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            raw = msgspec.json.decode(await request.read(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InputError(f"the body is not a JSON object: {error}") from None
        words = self._model.speaking()
        prompt = raw.get("prompt")
        if "messages" in raw:
            ids = await asyncio.to_thread(words.encode_chat, chat_of(raw))
        elif isinstance(prompt, str):
            ids = await asyncio.to_thread(words.encode, prompt)
        else:
            raise InputError("no text", where="prompt", fix='send {"prompt": "..."} or messages')
        limit = self._engine.limits.max_tokens
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids})

    # Completions ----------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = parse_completion(await request.read())
        self._check_model(asked)
        prompt = asked.only_prompt
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(
                self._model.speaking().encode, prompt, add_special_tokens=asked.add_special_tokens
            )
        default_tokens = min(DEFAULT_MAX_TOKENS, self._rest_tokens(prompt))
        return await self._generate(request, asked, TEXT, prompt, asked.sampling(default_tokens))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        parsed = parse_chat(await request.read())
        asked = parsed.asked
        self._check_model(asked)
        prompt = await asyncio.to_thread(self._model.speaking().encode_chat, parsed.chat)
        default_tokens = self._rest_tokens(prompt)
        return await self._generate(request, asked, CHAT, prompt, asked.sampling(default_tokens))

    def _rest_tokens(self, prompt: list[int]) -> int:
        """What a request that says no length may generate at most, as vLLM has it."""
        return max(1, self._engine.limits.max_tokens - len(prompt))

    def _check_model(self, asked: Generation) -> None:
        if asked.model is not None and asked.model != self._model.name:
            raise request_error(
                "model_not_found",
                f"{asked.model!r} is not served here; {self._model.name!r} is",
                param="model",
            )

    async def _generate(
        self,
        request: web.Request,
        asked: Generation,
        shape: Shape,
        prompt: list[int],
        sampling: Sampling,
    ) -> web.StreamResponse:
        work = Work(
            id=f"{shape.id_prefix}-{secrets.token_hex(12)}",
            prompt=prompt,
            sampling=sampling,
            salt=asked.cache_salt,
            transfer=transfer_of(asked, len(prompt)),
        )
        account = self._account(asked, shape, work)
        ongoing = self._serving.start(work)
        try:
            # The status line waits for the prompt: until then a failure is an HTTP status.
            first = await ongoing.events.get()
            match first:
                case Failed(error):
                    raise error
                case Prefilled():
                    account.prefilled(first)
            if asked.stream:
                return await self._stream(request, asked, ongoing, account)
            return await self._whole(ongoing, account)
        finally:
            ongoing.cancel("abort")

    def _account(self, asked: Generation, shape: Shape, work: Work) -> Account:
        words = self._model.words if asked.detokenize else None
        if asked.stops and words is None:
            raise InputError("stop strings without text", where="stop", fix="use stop_token_ids")
        handed_off = None
        if isinstance(work.transfer, RemoteDecode):
            handed_off = {
                "transfer_id": work.transfer.grant.transfer_id,
                "handoff_tokens": work.transfer.handoff_tokens,
            }
        return Account(
            shape=shape,
            id=work.id,
            model=self._model.name,
            created_s=int(time.time()),
            prompt_tokens=len(work.prompt),
            return_token_ids=asked.return_token_ids,
            answer=AnswerText(words.decode if words is not None else None, asked.stops),
            transfer=handed_off,
        )

    async def _whole(self, ongoing: Ongoing, account: Account) -> web.Response:
        text = ""
        while True:
            match await ongoing.events.get():
                case Token(id=token):
                    text += account.token(token)
                    if account.finish_reason is not None:
                        ongoing.cancel("stop")
                        return _json(account.whole(text))
                case Finished() as finished:
                    text += account.finished(finished)
                    return _json(account.whole(text))
                case Failed(error):
                    raise error

    async def _stream(
        self, request: web.Request, asked: Generation, ongoing: Ongoing, account: Account
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        try:
            await response.prepare(request)
            await self._write(response, asked, ongoing, account)
        except ConnectionResetError:
            pass  # the client has gone, and this was quicker than the word of it
        return response

    async def _write(
        self, response: web.StreamResponse, asked: Generation, ongoing: Ongoing, account: Account
    ) -> None:
        if (opening := account.opening()) is not None:
            await response.write(opening)
        held: list[int] = []  # tokens whose text is not certain yet
        while account.finish_reason is None:
            match await ongoing.events.get():
                case Token(id=token):
                    held.append(token)
                    text = account.token(token)
                    ended = account.finish_reason is not None
                    if text or ended or asked.return_token_ids:
                        await response.write(account.piece(text, held))
                        held = []
                    if ended:
                        ongoing.cancel("stop")
                case Finished() as finished:
                    text = account.finished(finished)
                    await response.write(account.piece(text, held))
                case Failed(error):
                    failure = errors.of_job(error)
                    await response.write(error_piece(errors.error_body(failure)))
                    break
        if account.finish_reason is not None and asked.stream_options is not None:
            if asked.stream_options.include_usage:
                await response.write(account.usage_piece())
        await response.write(DONE)
        await response.write_eof()


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except InputError as error:
        failure = errors.bad_input(error)
    except RequestError as error:
        failure = error
    except web.HTTPRequestEntityTooLarge:
        failure = request_error("invalid_request", f"a body of more than {MAX_BODY_BYTES} bytes")
    headers = {}
    if failure.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(failure.retry_after_s)))
    return _json(errors.error_body(failure), status=failure.status, headers=headers)


def _json(
    data: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data),
        status=status,
        headers=headers,
        content_type="application/json",
    )
