"""The console's paths: its page and assets, the login, the stream, requests and the prompt box."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from aiohttp import web

from prfaas.console import page
from prfaas.errors import InputError, RequestError
from prfaas.gateway.api.app import REQUEST_ID, VALID_ID
from prfaas.gateway.api.body_limits import BodyReader
from prfaas.gateway.api.content_encoding import too_large
from prfaas.gateway.console.access import ASSETS, LOGIN, PAGE, PREFIX, ConsoleAccess
from prfaas.gateway.console.feed import Feed
from prfaas.gateway.console.recent import RecentRequests
from prfaas.gateway.console.scenes import SceneSource
from prfaas.gateway.console.sessions import TooManyFailures
from prfaas.gateway.generation import GenerationApi, Sender

TITLE = "prfaas console"
FORM_BYTES = 4096  # of a login
PROMPT_BYTES = 1 << 18  # of the prompt box
MOST_OUTPUT_TOKENS = 4096
MOST_PROMPTS = 8  # of prompt boxes, at once
# A year. The address of an asset has a hash of its content.
_FOREVER = "private, max-age=31536000, immutable"
_PROBLEMS = {
    "key": "This is not the operator key.",
    "often": "Too many logins have failed. Try again in a minute.",
}
T = TypeVar("T")


class PromptForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the prompt box sends."""

    prompt: str | list[int]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_OUTPUT_TOKENS)] = 64
    tenant: str = ""


class ConsolePaths:
    def __init__(
        self,
        access: ConsoleAccess,
        feed: Feed,
        recent: RecentRequests,
        source: SceneSource,
        generation: GenerationApi,
        body_reader: BodyReader,
    ) -> None:
        self._access = access
        self._feed = feed
        self._recent = recent
        self._source = source
        self._generation = generation
        self._body_reader = body_reader
        self._prompts = 0  # of prompt boxes, that are being answered

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(PAGE, self._page)
        app.router.add_get(f"{ASSETS}{{name}}", self._asset)
        app.router.add_post(LOGIN, self._log_in)
        app.router.add_post(f"{PREFIX}logout", self._log_out)
        app.router.add_get(f"{PREFIX}stream", self._stream)
        app.router.add_get(f"{PREFIX}requests/{{id}}", self._request)
        app.router.add_post(f"{PREFIX}complete", self._complete)
        app.router.add_post(f"{PREFIX}explain", self._explain)
        app.on_response_prepare.append(self._protect)
        # Before the gateway waits for the responses that are being sent.
        app.on_shutdown.append(self._end_streams)

    def has(self, path: str) -> bool:
        return path == PAGE or path.startswith(PREFIX)

    def admit(self, request: web.Request) -> None:
        self._access.admit(request)

    # Pages ----------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        if self._access.is_logged_in(request):
            found = page.live_page(TITLE)
        else:
            problem = _PROBLEMS.get(request.query.get("problem", ""), "")
            found = page.login_page(TITLE, problem)
        return web.Response(text=found.html, content_type="text/html", headers=found.headers)

    async def _asset(self, request: web.Request) -> web.Response:
        found = page.asset(request.match_info["name"])
        if found is None:
            raise RequestError(404, "not_found", "the console has no such file")
        # Where a page of another version asks, the answer is not kept.
        kept = _FOREVER if request.query.get("v") == found.version else "no-store"
        return web.Response(
            body=found.content,
            content_type=found.content_type,
            charset="utf-8",
            headers={"Cache-Control": kept},
        )

    async def _log_in(self, request: web.Request) -> web.Response:
        key = parse_key(await self._read(request, FORM_BYTES))
        try:
            token = self._access.log_in(request, key)
        except TooManyFailures:
            return _see_page("?problem=often")
        if token is None:
            return _see_page("?problem=key")
        response = _see_page()
        self._access.set_cookie(response, token)
        return response

    async def _log_out(self, request: web.Request) -> web.Response:
        self._access.sessions.log_out(self._access.token(request))
        response = _see_page()
        self._access.remove_cookie(response)
        return response

    # State ----------------------------------------------------------------------------------------

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return web.Response(content_type="text/event-stream", headers=headers)

        def abort() -> None:
            if request.transport is not None:
                request.transport.abort()

        watcher = self._feed.open(lambda: self._access.is_logged_in(request), abort)
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        try:
            await response.prepare(request)
            message: bytes | None = watcher.first
            while message is not None:
                await response.write(message)
                message = await watcher.next()
        except ConnectionError:
            pass  # the console was closed, or did not read
        finally:
            self._feed.close(watcher)
        return response

    async def _request(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        found = self._recent.find(name) if VALID_ID.fullmatch(name) else None
        if found is None:
            raise RequestError(404, "not_found", "the console does not have this request any more")
        explanation = found.explanation
        return _json(
            {
                "request": found.scene,
                "explanation": None if explanation is None else self._source.describe(explanation),
                "failures": found.failures,
            }
        )

    # The prompt box -------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        body = {
            "prompt": form.prompt,
            "max_tokens": form.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sender = Sender(request[REQUEST_ID], form.tenant)
        with self._one_prompt():
            return await self._generation.answer_prompt(request, sender, msgspec.json.encode(body))

    async def _explain(self, request: web.Request) -> web.Response:
        form = await self._form(request)
        completion = {"prompt": form.prompt, "max_tokens": form.max_tokens}
        sender = Sender(request[REQUEST_ID], form.tenant)
        with (
            self._one_prompt(),
            self._body_reader.hold(msgspec.json.encode(completion)) as body,
        ):
            return _json(await self._generation.explain(request, sender, body))

    @contextmanager
    def _one_prompt(self) -> Iterator[None]:
        if self._prompts >= MOST_PROMPTS:
            raise RequestError(
                429,
                "too_many_prompts",
                f"{MOST_PROMPTS} prompts of consoles are being answered",
                retry_after_s=1.0,
            )
        self._prompts += 1
        try:
            yield
        finally:
            self._prompts -= 1

    async def _form(self, request: web.Request) -> PromptForm:
        form = _parse(await self._read(request, PROMPT_BYTES), PromptForm)
        known = self._access.credentials.tenants
        if form.tenant not in known:
            raise InputError("is not a tenant with a key", where="tenant", fix="choose another one")
        return form

    # ----------------------------------------------------------------------------------------------

    async def _read(self, request: web.Request, most_bytes: int) -> bytes:
        """A short body. A longer one is refused before it is read."""
        if request.content_length is None:
            raise RequestError(411, "length_required", "send a Content-Length")
        if request.content_length > most_bytes or request.headers.get("Content-Encoding"):
            raise too_large(most_bytes)
        async with self._body_reader.read(request, inline_bytes=most_bytes) as body:
            if body.data is None:
                raise too_large(most_bytes)
            return body.data

    async def _protect(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.has(request.path):
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
            response.headers.setdefault("Cache-Control", "no-store")
            # Of a page it has the scripts; any other response is not a page.
            response.headers.setdefault(
                "Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"
            )

    async def _end_streams(self, app: web.Application) -> None:
        self._feed.end()


def parse_key(data: bytes) -> str:
    """The field `key` of a form; empty: there is none, or the form is not one."""
    try:
        fields = parse_qs(data.decode("ascii"), max_num_fields=8)
    except ValueError:
        return ""
    return fields.get("key", [""])[0].strip()


def _parse(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"the body is not a prompt: {error}",
            fix='send {"prompt": "TEXT", "max_tokens": 64, "tenant": ""}',
        ) from None


def _see_page(query: str = "") -> web.Response:
    # Relative, so that the console also works below a path of a proxy.
    return web.Response(status=303, headers={"Location": f"../{query}"})


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")
