"""The gateway's client of a node. `prfaas node` and vLLM serve the same API (docs/nodes.md,
docs/vllm.md), with one difference: vLLM refuses a prefill with HTTP 200 and an error within
`kv_transfer_params`.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

import msgspec

from prfaas.config.gateway import DEFAULTS, GatewayTimeouts
from prfaas.contracts.kv_transfer_params import ResponseParams
from prfaas.contracts.openai import Usage, UsageField
from prfaas.contracts.openai_fields import Endpoint
from prfaas.errors import (
    ConnectionLost,
    MalformedResponse,
    PeerError,
    PeerHttpError,
    RequestError,
    StreamBroken,
)
from prfaas.gateway.client.answer_memory import Count, counting
from prfaas.gateway.client.report_checks import LONGEST_TEXT, count
from prfaas.http_client.client import Exchange, HttpClient
from prfaas.http_client.connection import READ_BYTES
from prfaas.http_client.paced_writer import RequestBody

DRAINING = "draining"  # the error code of a node that takes no new requests
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
# A label's value may not have a line end: a page of open braces would take quadratic time.
_LOAD = re.compile(rb"^vllm:num_requests_(running|waiting)(?:{[^}\n]*})? (\S+)$", re.MULTILINE)
METRICS_BYTES = 4 << 20
CARD_BYTES = 1 << 20
HEALTH_BYTES = 64 << 10
PREFILL_BYTES = 16 << 20
CHECKED_BYTES = 4 << 20
# Of a request in flight, which has memory for so much in any case: others that fill the memory must
# not cut streams and short answers off.
UNCOUNTED_BYTES = READ_BYTES
ANSWER_BYTES = 256 << 20  # of a whole answer, or of one event: log-probabilities of a long prompt
_MOST_REQUESTS = 10**6  # at one node
_MOST_TOKENS = 2**31
_SHOWN = 2000  # of an error event
_MOST_FIELDS = 1000  # that a node publishes for one endpoint


class Unless(Protocol):
    def __call__(self, give_up: Callable[[], None], /) -> AbstractContextManager[None]:
        """A context in which `give_up` may be called."""


def _never(_give_up: Callable[[], None], /) -> AbstractContextManager[None]:
    return nullcontext()


class Load(NamedTuple):
    """A node's requests, as it reports them."""

    running: int
    waiting: int


class Card(NamedTuple):
    """The model that a node serves."""

    model: str
    max_tokens: int | None
    # The fields that a `prfaas node` accepts, by endpoint. None: it is another server.
    serves: Mapping[Endpoint, frozenset[str]] | None = None

    @property
    def ours(self) -> bool:
        """It is a `prfaas node`, which can also hand off states at boundaries inside a step."""
        return self.serves is not None


_FieldNames: TypeAlias = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]],
    msgspec.Meta(max_length=_MOST_FIELDS),
]


class _Serves(msgspec.Struct, frozen=True):
    completions: _FieldNames
    chat: _FieldNames


class _Published(msgspec.Struct, frozen=True):
    serves: _Serves


class _Prefilled(msgspec.Struct, frozen=True):
    kv_transfer_params: ResponseParams | None = None
    usage: Usage | None = None


class _StreamError(msgspec.Struct, frozen=True):
    message: str
    status: int = 500
    code: str | int | None = None  # a number in vLLM


class _ErrorEvent(msgspec.Struct, frozen=True):
    error: _StreamError


class NodeClient:
    def __init__(
        self, http: HttpClient, url: str, timeouts: GatewayTimeouts = DEFAULTS.timeouts
    ) -> None:
        self._timeouts = timeouts
        self.url = url.rstrip("/")
        self._http = http

    async def card(self) -> Card:
        answer: Any = await self._http.request_json(
            "GET",
            f"{self.url}/v1/models",
            Any,
            timeout_s=self._timeouts.node_poll_timeout_s,
            max_bytes=CARD_BYTES,
        )
        try:
            card = answer["data"][0]
            model, longest, ours = card["id"], card.get("max_model_len"), card.get("prfaas")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise MalformedResponse(f"{self.url} does not list a model") from None
        if not isinstance(model, str) or not 0 < len(model) <= LONGEST_TEXT:
            raise MalformedResponse(f"{self.url}: id is not the name of a model")
        if longest is not None:
            count(longest, f"{self.url}: max_model_len", _MOST_TOKENS)
        return Card(model, longest, None if ours is None else _serves(ours, self.url))

    async def load(self) -> Load:
        """The sum over the engines of a server: with data parallelism a server has several."""
        page = await self._http.request(
            "GET",
            f"{self.url}/metrics",
            timeout_s=self._timeouts.node_poll_timeout_s,
            max_bytes=METRICS_BYTES,
        )
        found = {"running": 0.0, "waiting": 0.0}
        for name, value in _LOAD.findall(page):
            found[name.decode()] += _requests(value, f"{self.url}: num_requests_{name.decode()}")
        return Load(int(found["running"]), int(found["waiting"]))

    async def draining(self) -> bool:
        """Whether the node takes no new requests because it was asked to stop."""
        try:
            await self._http.request(
                "GET",
                f"{self.url}/health",
                timeout_s=self._timeouts.node_poll_timeout_s,
                max_bytes=HEALTH_BYTES,
            )
        except PeerHttpError as error:
            return error.code == DRAINING
        return False

    async def check(
        self, path: str, body: RequestBody, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        """Returns when the engine has accepted a short request, whose answer is of no use. Raises
        `PeerHttpError` when the engine refuses the request, or has no such path."""
        await self._http.request(
            "POST",
            f"{self.url}{path}",
            timeout_s=timeout_s,
            body=body,
            headers=headers,
            max_bytes=CHECKED_BYTES,
        )

    async def probe(self, timeout_s: float) -> None:
        """Asks for a sign of life, which any response is. Raises `PeerError`."""
        await self._http.request(
            "GET", f"{self.url}/health", timeout_s=timeout_s, max_bytes=HEALTH_BYTES
        )

    async def prefill(self, body: RequestBody, headers: Mapping[str, str]) -> int | None:
        """Returns when the node has computed the prefill and handed the result to its kvd; the
        receiving kvd reports when the transfer is committed. Returns the number of cached tokens,
        or None when the node does not report it."""
        answer = await self._http.request_json(
            "POST",
            f"{self.url}/v1/completions",
            _Prefilled,
            timeout_s=self._timeouts.prefill_s,
            body=body,
            headers=headers,
            max_bytes=PREFILL_BYTES,
        )
        params = answer.kv_transfer_params
        if params is not None and params.error:
            code = params.error.code
            status = 400 if code == "invalid_request" else 503
            raise PeerHttpError(status, code, params.error.message or code)
        cached = None if answer.usage is None else answer.usage.cached_tokens
        return cached if cached is not None and 0 <= cached <= _MOST_TOKENS else None

    @asynccontextmanager
    async def answer(
        self,
        path: str,
        body: RequestBody,
        headers: Mapping[str, str],
        *,
        stream: bool,
        unless: Unless = _never,
    ) -> AsyncIterator[NodeResponse]:
        """Entered when the first event has arrived, or the whole body of a response that is not a
        stream. From then on, `unless` has a function that ends the wait for further events. Callers
        that stop waiting earlier cancel the call."""
        url = f"{self.url}{path}"
        exchange = await self._http.send(
            "POST", url, body, headers, silence_s=self._timeouts.token_s
        )
        async with exchange:
            await exchange.check_status()
            count_held = counting.get()
            rest = _events(exchange, count_held) if stream else None
            first = (
                [await _whole(exchange, count_held, url)]
                if rest is None
                else await anext(rest, None)
            )
            if not first:
                raise ConnectionLost(f"{url}: the stream ended before the first token")
            if first[0].startswith(_ERROR):
                raise _error_of(first[0])
            response = NodeResponse(rest, first, url)
            del first  # which may be long, and is the response's to forget
            with unless(exchange.give_up):
                yield response


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
        self._first = []  # it may be long
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
        except (ConnectionLost, RequestError) as error:
            raise StreamBroken(str(error)) from None

    @property
    def output_tokens(self) -> int:
        """As the engine reports them, or one per event when it does not."""
        data = self._last.removeprefix(b"data:")
        try:
            usage = msgspec.json.decode(data, type=UsageField).usage
        except msgspec.MsgspecError:
            usage = None
        if usage is None or not 0 <= usage.completion_tokens <= _MOST_TOKENS:
            return self._events
        return usage.completion_tokens

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


async def _whole(exchange: Exchange, count_held: Count, url: str) -> bytes:
    """The body of an answer that does not stream. Its request counts it from now on, unless it is
    short."""
    parts: list[bytes] = []
    held = counted = 0
    try:
        while (data := await exchange.read_some()) is not None:
            parts.append(data)
            held += len(data)
            if held > UNCOUNTED_BYTES:
                more, counted = held - counted, held
                count_held(more)
            if held > ANSWER_BYTES:
                raise MalformedResponse(f"{url} sent more than {ANSWER_BYTES} bytes")
    except BaseException:
        count_held(-counted)  # another node may be asked
        raise
    return b"".join(parts)


async def _events(exchange: Exchange, count_held: Count) -> AsyncIterator[list[bytes]]:
    """Whole events, each with the empty line that ends it, in the batches in which they arrived.
    Counts a long event that has not ended, and then until the next one is asked for."""
    parts: list[bytes] = []  # of the event that has not ended
    held = counted = 0
    try:
        while (data := await exchange.read_some()) is not None:
            # The end of an event may be split over two reads; only the latest bytes are searched.
            if parts and parts[-1].endswith(b"\n"):
                last = parts.pop()
                held -= len(last)
                data = last + data
            *whole, rest = data.split(b"\n\n")
            if whole:
                whole[0] = b"".join([*parts, whole[0]])
                parts, held = [], 0
                yield [event + b"\n\n" for event in whole]
                del whole  # one of them may be long
            if rest:
                parts.append(rest)
                held += len(rest)
                if held > ANSWER_BYTES:
                    raise ConnectionLost(
                        f"an event of the stream has more than {ANSWER_BYTES} bytes"
                    )
            due = held if held > UNCOUNTED_BYTES else 0
            if due != counted:
                more, counted = due - counted, due
                count_held(more)
    except PeerError:
        count_held(-counted)  # another node may be asked
        raise


def _serves(ours: object, url: str) -> Mapping[Endpoint, frozenset[str]]:
    """The fields that a `prfaas node` publishes."""
    try:
        serves = msgspec.convert(ours, _Published).serves
    except msgspec.ValidationError as error:
        raise MalformedResponse(f"{url}: prfaas.serves is not a list of fields: {error}") from None
    return {"completions": frozenset(serves.completions), "chat": frozenset(serves.chat)}


def _requests(value: bytes, where: str) -> float:
    """A number of requests on a page of metrics."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MOST_REQUESTS:  # also refuses NaN
        raise MalformedResponse(f"{where} is not a number from 0 to {_MOST_REQUESTS}")
    return number


def _error_of(event: bytes) -> PeerHttpError:
    try:
        found = msgspec.json.decode(event.removeprefix(b"data:"), type=_ErrorEvent).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PeerHttpError(500, "", event[:_SHOWN].decode(errors="replace"))
    status = found.status if 400 <= found.status <= 599 else 500
    return PeerHttpError(status, str(found.code or "")[:_SHOWN], found.message[:_SHOWN])
