"""A node as gateways see it: ours and vLLM's speak the same language (docs/nodes.md, docs/vllm.md).

Where they differ: vLLM refuses a prefill with HTTP 200 and an error within `kv_transfer_params`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import msgspec

from prfaas.contracts.kv_transfer_params import ResponseParams
from prfaas.errors import ConnectionLost
from prfaas.gateway.request import StreamBroken
from prfaas.http_client.client import Exchange, HttpClient, PeerHttpError

LOOK_S = 3.0  # for metrics and cards
PREFILL_S = 600.0
SILENCE_S = 300.0  # between two events of a stream, and until the first, of a node that lives
_DRAINING = "draining"  # a node's word for it, at /health
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_LOAD = re.compile(rb"^vllm:num_requests_(running|waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)


class Unless(Protocol):
    def __call__(self, give_up: Callable[[], None], *, begun: bool) -> AbstractContextManager[None]:
        """A context in which `give_up` may be called; `begun`: the first token is there."""


def _never(give_up: Callable[[], None], *, begun: bool) -> AbstractContextManager[None]:
    return nullcontext()


class Load(NamedTuple):
    """What a node says it has to do."""

    running: int
    waiting: int


class Card(NamedTuple):
    """What a node serves."""

    model: str
    max_tokens: int | None
    ours: bool  # a `prfaas node`: can also hand off states at boundaries inside a step


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class _Used(msgspec.Struct, frozen=True):
    usage: Usage | None = None


class _Prefilled(msgspec.Struct, frozen=True):
    kv_transfer_params: ResponseParams | None = None
    usage: Usage | None = None


class NodeClient:
    def __init__(self, calls: HttpClient, url: str) -> None:
        self.url = url.rstrip("/")
        self._calls = calls

    async def card(self) -> Card:
        answer: Any = await self._calls.ask("GET", f"{self.url}/v1/models", Any, timeout_s=LOOK_S)
        try:
            card = answer["data"][0]
            return Card(str(card["id"]), card.get("max_model_len"), card.get("prfaas") is not None)
        except (KeyError, IndexError, TypeError):
            raise PeerHttpError(502, "", f"{self.url} does not say what it serves") from None

    async def load(self) -> Load:
        """Sums over the engines of a server (data parallelism has several)."""
        page = await self._calls.read("GET", f"{self.url}/metrics", LOOK_S)
        found = {"running": 0.0, "waiting": 0.0}
        for name, value in _LOAD.findall(page):
            found[name.decode()] += float(value)
        return Load(int(found["running"]), int(found["waiting"]))

    async def leaving(self) -> bool:
        """Whether it was told to stop: it finishes what it has."""
        try:
            await self._calls.read("GET", f"{self.url}/health", LOOK_S)
        except PeerHttpError as error:
            return error.code == _DRAINING
        return False

    async def prefill(self, body: bytes, headers: Mapping[str, str]) -> int | None:
        """Returns when the node has computed and handed to its kvd what it was asked for; the
        receiver's kvd says when it is there. How many tokens it had cached, where it says so."""
        answer = await self._calls.ask(
            "POST",
            f"{self.url}/v1/completions",
            _Prefilled,
            timeout_s=PREFILL_S,
            body=body,
            headers=headers,
        )
        params = answer.kv_transfer_params
        if params is not None and params.error:
            code = params.error.code
            status = 400 if code == "invalid_request" else 503
            raise PeerHttpError(status, code, params.error.message or code)
        details = answer.usage and answer.usage.prompt_tokens_details
        return details.cached_tokens if details else None

    @asynccontextmanager
    async def answer(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        stream: bool,
        unless: Unless = _never,
    ) -> AsyncIterator[Answer]:
        """Entered when the first event is there, or the whole body of what is no stream. `unless`
        is given what ends the waiting, for as long as there is something to wait for."""
        url = f"{self.url}{path}"
        exchange = await self._calls.send("POST", url, body, headers, silence_s=SILENCE_S)
        async with exchange:
            with unless(exchange.give_up, begun=False):
                await exchange.accepted()
                rest = _events(exchange) if stream else None
                first = [await exchange.rest()] if rest is None else await anext(rest, None)
            if not first:
                raise ConnectionLost(f"{url}: ended before the first token")
            if first[0].startswith(_ERROR):
                raise _error_of(first[0])
            with unless(exchange.give_up, begun=True):
                yield Answer(rest, first, url)


class Answer:
    """The decode engine's answer, an `Upstream`."""

    def __init__(
        self, rest: AsyncIterator[list[bytes]] | None, first: list[bytes], url: str
    ) -> None:
        self._rest = rest
        self._first = first
        self._url = url
        self._events = 0
        self._last = b""  # that says something
        self.whole = False  # ended as it should

    async def events(self) -> AsyncIterator[list[bytes]]:
        together: list[bytes] | None = self._first
        while together is not None:
            said, error = self._taken(together)
            if said:
                yield said
            if error is not None:
                raise StreamBroken(str(error))
            together = await self._more()
        if not self.whole:
            raise StreamBroken(f"{self._url}: the stream ended too soon")

    async def _more(self) -> list[bytes] | None:
        if self._rest is None:
            self.whole = True
            return None
        try:
            return await anext(self._rest, None)
        except ConnectionLost as error:
            raise StreamBroken(str(error)) from None

    @property
    def output_tokens(self) -> int:
        """As the engine counts them; where it does not say, one an event."""
        data = self._last.removeprefix(b"data:")
        try:
            usage = msgspec.json.decode(data, type=_Used).usage
        except msgspec.MsgspecError:
            usage = None
        return self._events if usage is None else usage.completion_tokens

    def _taken(self, together: list[bytes]) -> tuple[list[bytes], PeerHttpError | None]:
        """What of it is an answer, and the error behind that, if there is one."""
        for place, event in enumerate(together):
            if event.startswith(_ERROR):
                return together[:place], _error_of(event)
            if event.startswith(_DONE):
                self.whole = True
            else:
                self._events += 1
                self._last = event
        return together, None


async def _events(exchange: Exchange) -> AsyncIterator[list[bytes]]:
    """Whole events, each with the empty line behind it; those together that came together."""
    held = b""
    while (data := await exchange.more()) is not None:
        *whole, held = (held + data).split(b"\n\n")
        if whole:
            yield [event + b"\n\n" for event in whole]


def _error_of(event: bytes) -> PeerHttpError:
    try:
        error = msgspec.json.decode(event.removeprefix(b"data:"))["error"]
        return PeerHttpError(
            int(error.get("status", 500)), str(error.get("code") or ""), error["message"]
        )
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError):
        return PeerHttpError(500, "", event.decode(errors="replace"))
