"""The gateway's client of a node. `prfaas node` and vLLM serve the same API (docs/nodes.md,
docs/vllm.md), with one difference: vLLM refuses a prefill with HTTP 200 and an error within
`kv_transfer_params`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import msgspec

from prfaas.contracts.kv_transfer_params import ResponseParams
from prfaas.contracts.openai import Usage, UsageField
from prfaas.errors import ConnectionLost, PeerHttpError, StreamBroken
from prfaas.http_client.client import Exchange, HttpClient

LOOK_S = 3.0  # for metrics, health and the model card
PREFILL_S = 600.0
SILENCE_S = 300.0  # longest time without an event from a node that is alive
_DRAINING = "draining"  # the error code of /health
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_LOAD = re.compile(rb"^vllm:num_requests_(running|waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)


class Unless(Protocol):
    def __call__(self, give_up: Callable[[], None], *, begun: bool) -> AbstractContextManager[None]:
        """A context in which `give_up` may be called. `begun`: the first token has arrived."""


def _never(give_up: Callable[[], None], *, begun: bool) -> AbstractContextManager[None]:
    return nullcontext()


class Load(NamedTuple):
    """A node's requests, as it reports them."""

    running: int
    waiting: int


class Card(NamedTuple):
    """The model that a node serves."""

    model: str
    max_tokens: int | None
    ours: bool  # it is a `prfaas node`, which can also hand off states at boundaries inside a step


class _Prefilled(msgspec.Struct, frozen=True):
    kv_transfer_params: ResponseParams | None = None
    usage: Usage | None = None


class NodeClient:
    def __init__(self, http: HttpClient, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = http

    async def card(self) -> Card:
        answer: Any = await self._http.request_json(
            "GET", f"{self.url}/v1/models", Any, timeout_s=LOOK_S
        )
        try:
            card = answer["data"][0]
            return Card(str(card["id"]), card.get("max_model_len"), card.get("prfaas") is not None)
        except (KeyError, IndexError, TypeError):
            raise PeerHttpError(502, "", f"{self.url} does not list a model") from None

    async def load(self) -> Load:
        """The sum over the engines of a server: with data parallelism a server has several."""
        page = await self._http.request("GET", f"{self.url}/metrics", timeout_s=LOOK_S)
        found = {"running": 0.0, "waiting": 0.0}
        for name, value in _LOAD.findall(page):
            found[name.decode()] += float(value)
        return Load(int(found["running"]), int(found["waiting"]))

    async def draining(self) -> bool:
        """Whether the node takes no new requests because it was asked to stop."""
        try:
            await self._http.request("GET", f"{self.url}/health", timeout_s=LOOK_S)
        except PeerHttpError as error:
            return error.code == _DRAINING
        return False

    async def prefill(self, body: bytes, headers: Mapping[str, str]) -> int | None:
        """Returns when the node has computed the prefill and handed the result to its kvd; the
        receiving kvd reports when the transfer is committed. Returns the number of cached tokens,
        or None when the node does not report it."""
        answer = await self._http.request_json(
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
        return answer.usage.cached_tokens if answer.usage is not None else None

    @asynccontextmanager
    async def answer(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        stream: bool,
        unless: Unless = _never,
    ) -> AsyncIterator[NodeResponse]:
        """Entered when the first event has arrived, or the whole body of a response that is not a
        stream. `unless` gets a function that ends the wait, before and after the first token."""
        url = f"{self.url}{path}"
        exchange = await self._http.send("POST", url, body, headers, silence_s=SILENCE_S)
        async with exchange:
            with unless(exchange.give_up, begun=False):
                await exchange.check_status()
                rest = _events(exchange) if stream else None
                first = [await exchange.read_rest()] if rest is None else await anext(rest, None)
            if not first:
                raise ConnectionLost(f"{url}: the stream ended before the first token")
            if first[0].startswith(_ERROR):
                raise _error_of(first[0])
            with unless(exchange.give_up, begun=True):
                yield NodeResponse(rest, first, url)


class NodeResponse:
    """The decode engine's response, an `Upstream`."""

    def __init__(
        self, rest: AsyncIterator[list[bytes]] | None, first: list[bytes], url: str
    ) -> None:
        self._rest = rest
        self._first = first
        self._url = url
        self._events = 0
        self._last = b""  # the last event before [DONE]
        self.complete = False  # it ended with [DONE], or is a whole body

    async def events(self) -> AsyncIterator[list[bytes]]:
        batch: list[bytes] | None = self._first
        while batch is not None:
            events, error = self._split_error(batch)
            if events:
                yield events
            if error is not None:
                raise StreamBroken(str(error))
            batch = await self._next_batch()
        if not self.complete:
            raise StreamBroken(f"{self._url}: the stream ended before [DONE]")

    async def _next_batch(self) -> list[bytes] | None:
        if self._rest is None:
            self.complete = True
            return None
        try:
            return await anext(self._rest, None)
        except ConnectionLost as error:
            raise StreamBroken(str(error)) from None

    @property
    def output_tokens(self) -> int:
        """As the engine reports them, or one per event when it does not."""
        data = self._last.removeprefix(b"data:")
        try:
            usage = msgspec.json.decode(data, type=UsageField).usage
        except msgspec.MsgspecError:
            usage = None
        return self._events if usage is None else usage.completion_tokens

    def _split_error(self, batch: list[bytes]) -> tuple[list[bytes], PeerHttpError | None]:
        """The events before an error event, and the error."""
        for index, event in enumerate(batch):
            if event.startswith(_ERROR):
                return batch[:index], _error_of(event)
            if event.startswith(_DONE):
                self.complete = True
            else:
                self._events += 1
                self._last = event
        return batch, None


async def _events(exchange: Exchange) -> AsyncIterator[list[bytes]]:
    """Whole events, each with the empty line that ends it, in the batches in which they arrived."""
    rest = b""
    while (data := await exchange.read_some()) is not None:
        *whole, rest = (rest + data).split(b"\n\n")
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
