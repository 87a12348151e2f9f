"""One client for both kinds of nodes, against a server with scripted responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest
from aiohttp import web

from prfaas.errors import (
    ConnectionLost,
    MalformedResponse,
    PeerHttpError,
    RequestError,
    StreamBroken,
)
from prfaas.gateway.client import node_client
from prfaas.gateway.client.answer_memory import counting
from prfaas.gateway.client.node_client import Card, Load, NodeClient
from prfaas.http_client.client import open_client
from tests.gateway.backends import until

DONE = b"data: [DONE]\n\n"
TOKENS = [b'data: {"choices":[{"token_ids":[%d]}]}\n\n' % i for i in range(4)]
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":9}}\n\n'


@asynccontextmanager
async def node(
    *pieces: bytes, path: str = "/v1/completions", status: int = 200, cut: bool = False
) -> AsyncIterator[NodeClient]:
    """Sends `pieces` one by one; `cut`: and closes the connection in the middle of the answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if cut and request.transport is not None:
            request.transport.close()
        return response

    async with serving(answer, path) as client:
        yield client


@asynccontextmanager
async def serving(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], path: str = "/v1/completions"
) -> AsyncIterator[NodeClient]:
    app = web.Application()
    app.router.add_route("*", path, answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with open_client() as http:
            yield NodeClient(http, f"http://{host}:{port}/")
    finally:
        await runner.cleanup()


async def streamed(client: NodeClient) -> tuple[list[bytes], int]:
    async with client.answer("/v1/completions", b"{}", {}, stream=True) as answer:
        events = [event async for batch in answer.events() for event in batch]
        return events, answer.output_tokens


@pytest.mark.parametrize("size", [1, 7, 41, 1000])
async def test_events_are_whole_for_every_split_of_the_stream(size: int) -> None:
    whole = b"".join([*TOKENS, USAGE, DONE])
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]

    async with node(*pieces) as client:
        assert await streamed(client) == ([*TOKENS, USAGE, DONE], 9)


async def test_giving_up_on_a_silent_node() -> None:
    """After its first token, while its connection stays open."""
    silent = asyncio.Event()
    give_ups: list[Callable[[], None]] = []

    @contextmanager
    def unless(give_up: Callable[[], None]) -> Iterator[None]:
        give_ups.append(give_up)
        yield
        give_ups.clear()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(TOKENS[0])
        silent.set()
        await asyncio.Event().wait()
        return response

    async def read(client: NodeClient) -> None:
        opening = client.answer("/v1/completions", b"{}", {}, stream=True, unless=unless)
        async with opening as found:
            async for _ in found.events():
                pass

    async with serving(answer) as client:
        reading = asyncio.create_task(read(client))
        await silent.wait()
        await until(lambda: bool(give_ups))
        give_ups[0]()
        with pytest.raises(StreamBroken):
            await reading


async def test_without_usage_events_are_counted() -> None:
    async with node(*TOKENS, DONE) as client:
        assert await streamed(client) == ([*TOKENS, DONE], len(TOKENS))


@pytest.mark.parametrize(
    ("pieces", "cut"),
    [
        (TOKENS, True),
        (TOKENS, False),
        (
            [TOKENS[0], b'data: {"error":{"message":"lost","code":"engine_failed"}}\n\n', DONE],
            False,
        ),
    ],
)
async def test_a_stream_that_ends_before_done_is_broken(pieces: Sequence[bytes], cut: bool) -> None:
    async with node(*pieces, cut=cut) as client:
        with pytest.raises(StreamBroken):
            await streamed(client)


async def test_a_failure_before_the_first_token_is_a_peer_error() -> None:
    error = b'data: {"error":{"message":"lost","code":"transfer_lost"}}\n\n'
    async with node(error, DONE) as client:
        with pytest.raises(PeerHttpError, match="lost") as error:
            await streamed(client)
        assert error.value.code == "transfer_lost"
    async with node() as client:
        with pytest.raises(ConnectionLost):
            await streamed(client)


async def test_a_response_that_is_not_a_stream_is_one_item() -> None:
    body = json.dumps({"choices": [], "usage": {"completion_tokens": 3}}).encode()

    async with node(body[:5], body[5:]) as client:
        async with client.answer("/v1/completions", b"{}", {}, stream=False) as answer:
            assert [parts async for parts in answer.events()] == [[body]]
            assert answer.complete and answer.output_tokens == 3


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"do_remote_prefill": False, "error": {"code": "overloaded"}}, 503),
        ({"do_remote_prefill": False, "error": {"code": "invalid_request"}}, 400),
        ({"do_remote_prefill": True, "transfer_id": "t"}, None),
        (None, None),
    ],
)
async def test_vllm_refuses_a_prefill_with_http_200(params: object, status: int | None) -> None:
    body = json.dumps({"choices": [], "kv_transfer_params": params}).encode()

    async with node(body) as client:
        if status is None:
            await client.prefill(b"{}", {})
            return
        with pytest.raises(PeerHttpError) as error:
            await client.prefill(b"{}", {})
        assert error.value.status == status


async def test_load_and_card_of_both_kinds() -> None:
    page = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
"""

    async with node(page, path="/metrics") as client:
        assert await client.load() == Load(3, 4)
    listed = {"completions": ["prompt"], "chat": ["messages", "n"]}
    serves = {"completions": frozenset({"prompt"}), "chat": frozenset({"messages", "n"})}
    for extra, more in (
        ({}, ()),
        ({"prfaas": {"kvd_url": None, "serves": listed}}, (serves,)),
    ):
        body = json.dumps({"data": [{"id": "m", "max_model_len": 8, **extra}]}).encode()
        async with node(body, path="/v1/models") as client:
            assert await client.card() == Card("m", 8, *more)
    async with node(b"{}", path="/v1/models") as client:
        with pytest.raises(PeerHttpError):
            await client.card()


@pytest.mark.parametrize("value", ["NaN", "inf", "-inf", "-1", "1e300", "many", "1" * 5000])
async def test_a_load_that_is_not_a_count_is_refused(value: str) -> None:
    async with node(b"vllm:num_requests_running %s\n" % value.encode(), path="/metrics") as client:
        with pytest.raises(MalformedResponse, match="num_requests_running"):
            await client.load()


@pytest.mark.parametrize(
    "card",
    [
        b'"id": "m", "max_model_len": "4096"',
        b'"id": "m", "max_model_len": -1',
        b'"id": "m", "max_model_len": 1' + b"0" * 4000,
        b'"id": "m", "max_model_len": 1.5',
        b'"id": "%s"' % (b"m" * 10_000),
        b'"id": ["m"]',
    ],
    ids=["text", "negative", "huge", "fraction", "long-name", "not-a-name"],
)
async def test_a_card_with_impossible_fields_is_refused(card: bytes) -> None:
    async with node(b'{"data": [{%s}]}' % card, path="/v1/models") as client:
        with pytest.raises(MalformedResponse, match="id is not|max_model_len is not"):
            await client.card()


@pytest.mark.parametrize(
    "serves",
    [5, {}, {"completions": ["a"]}, {"completions": [1], "chat": []}]
    + [{"completions": ["a"] * 1001, "chat": []}, {"completions": ["a" * 1000], "chat": []}],
)
async def test_the_fields_that_a_node_publishes_are_bounded(serves: object) -> None:
    card = {"id": "m", "prfaas": {"serves": serves}}
    async with node(json.dumps({"data": [card]}).encode(), path="/v1/models") as client:
        with pytest.raises(MalformedResponse, match="serves"):
            await client.card()


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too long", "code": "invalid_request", "param": "prompt"}}',
        b'{"code": "incompatible", "message": "too long"}',
        b"too long",
    ],
)
async def test_error_bodies_of_every_format_are_understood(body: bytes) -> None:
    async with node(body, status=400) as client:
        with pytest.raises(PeerHttpError, match="too long") as error:
            await client.prefill(b"{}", {})
        assert error.value.status == 400


async def test_an_event_has_a_limit_and_arrives_whole_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_client, "ANSWER_BYTES", 100_000)
    event = b"data: " + b"x" * 90_000 + b"\n\n"
    pieces = [event[at : at + 997] for at in range(0, len(event), 997)]
    async with node(*pieces, DONE) as client:
        assert await streamed(client) == ([event, DONE], 1)
    async with node(TOKENS[0], *pieces[:-1], *pieces[:-1], DONE) as client:
        with pytest.raises(StreamBroken, match="more than 100000 bytes"):
            await streamed(client)


class Counter:
    """What a request holds of its answer."""

    def __init__(self, most: int) -> None:
        self.held, self.highest, self._most = 0, 0, most

    def __call__(self, nbytes: int) -> None:
        self.held += nbytes
        self.highest = max(self.highest, self.held)
        if self.held > self._most:
            raise RequestError(503, "overloaded", "no room")


@contextmanager
def counted(most: int = 1 << 30) -> Iterator[Counter]:
    counter = Counter(most)
    token = counting.set(counter)
    try:
        yield counter
    finally:
        counting.reset(token)


async def test_a_whole_answer_is_counted_while_it_arrives() -> None:
    body = b'{"choices": "%s"}' % (b"x" * 1_000_000)
    async with node(body) as client:
        with counted() as counter:
            async with client.answer("/v1/completions", b"{}", {}, stream=False) as answer:
                assert [parts async for parts in answer.events()] == [[body]]
            assert counter.held == len(body), "the request holds it until the client has it"
        with counted(500_000) as counter:
            with pytest.raises(RequestError, match="no room"):
                async with client.answer("/v1/completions", b"{}", {}, stream=False):
                    pass
            assert counter.held == 0 and counter.highest < len(body)


async def test_short_answers_and_events_need_no_room() -> None:
    """They are not lost while others fill the memory."""
    event = b"data: " + b"x" * 100_000 + b"\n\n"
    async with node(event[:50_000], event[50_000:], DONE) as client:
        with counted(0) as counter:
            assert await streamed(client) == ([event, DONE], 1)
            assert counter.highest == 0
    async with node(b'{"choices": []}') as client:
        with counted(0):
            async with client.answer("/v1/completions", b"{}", {}, stream=False):
                pass


async def test_an_event_is_counted_until_it_has_arrived_to_its_end() -> None:
    event = b"data: " + b"x" * 1_000_000 + b"\n\n"
    async with node(TOKENS[0], event[:500_000], event[500_000:], TOKENS[1], DONE) as client:
        with counted() as counter:
            assert (await streamed(client))[0] == [TOKENS[0], event, TOKENS[1], DONE]
            assert counter.held == 0 and counter.highest >= 500_000
        with counted(400_000), pytest.raises(StreamBroken, match="no room"):
            await streamed(client)


async def test_a_page_of_open_braces_is_read_in_no_time() -> None:
    """A pattern that looks for the closing brace across lines would take hours."""
    page = b"vllm:num_requests_running{\n" * 100_000 + b"vllm:num_requests_running 2\n"
    async with node(page, path="/metrics") as client:
        assert await client.load() == Load(2, 0)


@pytest.mark.parametrize("cached", [-1, 2**40, 10**30])
async def test_an_impossible_number_of_cached_tokens_is_not_reported(cached: int) -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": cached}}
    async with node(json.dumps({"choices": [], "usage": usage}).encode()) as client:
        assert await client.prefill(b"{}", {}) is None


async def test_an_impossible_number_of_output_tokens_is_counted_instead() -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":-9}}\n\n'
    async with node(*TOKENS, usage, DONE) as client:
        assert (await streamed(client))[1] == len(TOKENS) + 1


@pytest.mark.parametrize(
    "error",
    [
        {"message": "m" * 10_000, "code": 400, "status": 99},
        {"message": "m", "code": ["x"], "status": "many"},
        {"message": {"a": 1}},
        {"message": "m", "status": 10**400},
    ],
)
async def test_an_error_event_has_bounded_fields(error: dict[str, object]) -> None:
    async with node(b"data: " + json.dumps({"error": error}).encode() + b"\n\n") as client:
        with pytest.raises(PeerHttpError) as raised:
            await streamed(client)
    found = raised.value
    assert 400 <= found.status <= 599 and len(found.message) <= 2000 and len(found.code) <= 2000
