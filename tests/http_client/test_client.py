"""The HTTP client over real sockets, against a server with scripted responses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConnectionLost, PeerHttpError
from prfaas.http_client import client as client_module
from prfaas.http_client.client import HttpClient, open_client
from prfaas.http_client.connection import HELD_BYTES, PAUSED_S, READ_BYTES
from prfaas.security.shared_key import SharedKey
from tests.gateway.backends import until
from tests.waiting import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"


class Peer:
    """Sends the next of `answers` for each request, in the given pieces; then sends nothing."""

    def __init__(self, answers: Sequence[Sequence[bytes]], *, closes: bool) -> None:
        self._answers = iter(answers)
        self._closes = closes
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [int(line[15:]) for line in head.split(b"\r\n") if b"-Length" in line]
                body = await reader.readexactly(length[0]) if length else b""
                self.requests.append(head + body)
                for piece in next(self._answers, ()):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._closes:
                    writer.close()
                    await writer.wait_closed()  # aborting might drop bytes that were sent
                    break
        self.open -= 1


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """The URL of a server. Leaving the block closes its connections and ends its tasks."""
    running: set[asyncio.Task[None]] = set()

    async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:
            pass  # at the end of the block; asyncio logs an error for a cancelled handler
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(kept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def talking(*answers: Sequence[bytes], closes: bool = False) -> AsyncIterator[Peer]:
    peer = Peer(answers, closes=closes)
    async with serving(peer.serve) as peer.url:
        yield peer


async def read(http: HttpClient, peer: Peer, *, timeout_s: float = 20.0) -> bytes:
    return await http.request("GET", f"{peer.url}/x", timeout_s=timeout_s)


async def test_a_request_on_the_wire() -> None:
    async with talking([HELLO]) as peer, open_client(SharedKey(["secret"])) as http:
        answer = await http.request(
            "POST",
            f"{peer.url}/v1/a?b=1",
            timeout_s=20,
            body=b"{}",
            headers={"X-Request-Id": "7"},
        )
        assert answer == b"hello"
        host = peer.url.removeprefix("http://")
        (request,) = peer.requests
        assert request.decode() == (
            f"POST /v1/a?b=1 HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret\r\n"
            "X-Request-Id: 7\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )


framings = st.sampled_from(["length", "chunked", "until the end"])


@given(framings, st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=8), st.data())
async def test_every_framing_and_every_split_of_a_response(
    framing: str, body: bytes, cuts: list[int], data: st.DataObject
) -> None:
    if framing == "length":
        whole = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif framing == "chunked":
        at = data.draw(st.integers(0, len(body)))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (body[:at], body[at:]) if c)
        whole = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    else:
        whole = OK + b"\r\n" + body
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]

    async with talking(pieces, closes=framing == "until the end") as peer, open_client() as http:
        assert await read(http, peer) == body


async def test_connections_are_reused() -> None:
    async with talking(*[[HELLO]] * 4) as peer, open_client() as http:
        for _ in range(3):
            assert await read(http, peer) == b"hello"
        assert peer.connections == 1


@pytest.mark.parametrize(
    "first",
    [
        OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello",
        HELLO + b"and more",  # data with no request pending
    ],
)
async def test_connections_that_are_not_reused(first: bytes) -> None:
    async with talking([first], [HELLO]) as peer, open_client() as http:
        assert await read(http, peer) == b"hello"
        await until(lambda: peer.open == 0)
        assert await read(http, peer) == b"hello"
        assert peer.connections == 2


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_S", 0.01)

    async with talking([HELLO]) as peer, open_client() as http:
        await read(http, peer)
        await until(lambda: peer.open == 0)


async def test_informational_responses_are_skipped() -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with talking([hint, HELLO]) as peer, open_client() as http:
        assert await read(http, peer) == b"hello"


@pytest.mark.parametrize(
    ("pieces", "closes", "expected"),
    [
        ([], True, "closed by the peer"),
        ([OK], True, "closed by the peer"),
        ([HELLO[:-1]], True, "closed by the peer"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"], True, "closed by the peer"),
        ([b"220 mail.example.org ESMTP\r\n"], False, "is not HTTP"),
        ([], False, "no response in time"),
        ([HELLO[:-1]], False, "no response in time"),
    ],
)
async def test_a_response_that_does_not_arrive(
    pieces: list[bytes], closes: bool, expected: str
) -> None:
    async with talking(pieces, closes=closes) as peer, open_client() as http:
        with pytest.raises(ConnectionLost, match=expected):
            await read(http, peer, timeout_s=20.0 if "time" not in expected else 0.05)
        await until(lambda: peer.open == 0)


def test_silence_is_bounded_and_a_stream_is_not() -> None:
    """Ten pieces in six times the bound; then nothing. The test moves the clock instead."""
    bound_s, pieces = 100.0, 10
    taken_events: list[asyncio.Event] = []

    async def send_pieces(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
        for taken in taken_events:
            writer.write(b"1\r\na\r\n")
            await taken.wait()
        await asyncio.Event().wait()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MovedLoop)
        taken_events.extend(asyncio.Event() for _ in range(pieces))
        async with serving(send_pieces) as url, open_client() as http:
            async with await http.send("GET", url, silence_s=bound_s) as exchange:
                await exchange.check_status()
                for taken in taken_events:
                    assert await exchange.read_some() == b"a"
                    loop.move(0.6 * bound_s)
                    taken.set()
                # Not beyond the bound by far: that would be a pause of this process.
                loop.move(0.4 * bound_s + 0.5 * PAUSED_S)
                with pytest.raises(ConnectionLost, match="no response in time"):
                    await exchange.read_some()

    # Not an async test: this test needs an event loop of another class.
    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(main())


def test_a_peer_gets_its_time_again_after_a_pause_of_this_process() -> None:
    """The request may not have been sent before the pause."""
    bound_s = 100.0
    may_respond = asyncio.Event()

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_respond.wait()
        writer.write(HELLO)
        await writer.drain()
        await asyncio.Event().wait()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MovedLoop)
        async with serving(respond) as url, open_client() as http:
            for responds in (True, False):
                exchange = await http.send("GET", url, total_s=bound_s, silence_s=bound_s)
                async with exchange:
                    loop.move(bound_s + 2 * PAUSED_S)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)  # the timers that are due have run
                    if responds:
                        may_respond.set()
                        await exchange.check_status()
                        assert await exchange.read_rest() == b"hello"
                        continue
                    loop.move(bound_s + 0.5 * PAUSED_S)
                    with pytest.raises(ConnectionLost, match="no response in time"):
                        await exchange.check_status()

    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(main())


def test_each_exchange_of_a_connection_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer that is set is that of an exchange before, or of the idle connection."""
    idle_s = 1_000.0
    monkeypatch.setattr(client_module, "IDLE_S", idle_s)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MovedLoop)
        async with talking([HELLO], [HELLO], []) as peer, open_client() as http:
            assert await read(http, peer, timeout_s=0.5 * idle_s) == b"hello"
            loop.move(0.6 * idle_s)
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the timers that are due have run
            assert await read(http, peer, timeout_s=100 * idle_s) == b"hello"
            assert (peer.connections, peer.open) == (1, 1)
            bound_s = 0.2 * idle_s
            async with await http.send("GET", peer.url, total_s=bound_s) as exchange:
                loop.move(bound_s + 0.5 * PAUSED_S)
                with pytest.raises(ConnectionLost, match="no response in time"):
                    await exchange.check_status()
            assert peer.connections == 1

    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(main())


class MovedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be moved forwards."""

    _moved_s = 0.0

    def time(self) -> float:
        return super().time() + self._moved_s

    def move(self, seconds: float) -> None:
        self._moved_s += seconds


async def test_a_caller_that_does_not_read_slows_down_the_peer() -> None:
    """Bytes that are not read stay with the sender: kernels hold a few MB, and the client what the
    memory of a gateway is planned with."""
    total = 64 << 20
    sent = 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OK + b"Content-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16
        writer.close()
        await writer.wait_closed()

    async with serving(pour) as url, open_client() as http:
        async with await http.send("GET", url, silence_s=20) as exchange:
            await exchange.check_status()
            before = -1
            while before != sent:  # until the sender has to wait
                before = sent
                await asyncio.sleep(0.1)
            assert sent < total
            held = exchange._connection._held_bytes
            assert 0 < held <= HELD_BYTES + READ_BYTES
            assert len(await exchange.read_rest()) == total


async def test_cancelling_a_request_closes_the_connection() -> None:
    async with talking([HELLO[:-1]], [HELLO]) as peer, open_client() as http:
        reading = asyncio.create_task(read(http, peer))
        await until(lambda: bool(peer.requests))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: peer.open == 0)
        assert await read(http, peer) == b"hello"


async def test_errors_in_both_formats() -> None:
    openai = b'{"error":{"message":"no","code":"full","param":"prompt"}}'
    problem = b'{"code":"gone","message":"it was here"}'
    for body, code in ((openai, "full"), (problem, "gone"), (b"<html>", ""), (b'"\xff"', "")):
        answer = b"HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n%b"
        async with talking([answer % (len(body), body)], [HELLO]) as peer, open_client() as http:
            with pytest.raises(PeerHttpError) as error:
                await read(http, peer)
            assert (error.value.status, error.value.code) == (503, code)
            assert error.value.retry_after_s == 7
            assert await read(http, peer) == b"hello"
            assert peer.connections == 1, "a connection is reused after an error response"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/x",
        "127.0.0.1:80",
        "http://",
        "http://127.0.0.1:99999/x",
        "http://127.0.0.1:1/a b",
        "http://127.0.0.1:1/a\r\nX: y",
        "http://[::1/x",
        "http://127.0.0.1:1/",  # no process listens
        "http://a..b/",  # IDNA refuses the host name
    ],
)
async def test_urls_without_a_peer(url: str) -> None:
    async with open_client() as http:
        with pytest.raises(ConnectionLost):
            await http.request("GET", url, timeout_s=20)


async def test_a_header_is_one_line() -> None:
    async with talking([HELLO]) as peer, open_client() as http:
        with pytest.raises(ValueError, match="X-Request-Id"):
            await http.request(
                "GET", peer.url, timeout_s=20, headers={"X-Request-Id": "a\r\nHost: b"}
            )


@pytest.mark.parametrize("body", [b'"\xff"', b"[" * 100_000, b"{}", b"<html>"])
async def test_a_response_that_is_not_the_expected_json(body: bytes) -> None:
    whole = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with talking([whole]) as peer, open_client() as http:
        with pytest.raises(PeerHttpError, match="unexpected response") as error:
            await http.request_json("GET", peer.url, list[int], timeout_s=20)
        assert error.value.status == 502


# What a peer may send -----------------------------------------------------------------------------


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    """Sends `head`, and then far more than any limit."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        for _ in range(100):
            writer.write(b"x" * 65_536)
            await writer.drain()


async def test_a_response_beyond_its_limit_is_not_read() -> None:
    """Neither one that announces its size, nor one that does not."""
    for framing in (b"Content-Length: 1000000000000\r\n", b""):
        head = OK + framing + b"\r\n"
        async with serving(partial(endless, head=head)) as url, open_client() as http:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(PeerHttpError, match="more than 1000 bytes"):
                    await http.request("GET", url, timeout_s=2 * PATIENCE_S, max_bytes=1000)


async def test_an_endless_error_response_is_cut() -> None:
    head = b"HTTP/1.1 500 No\r\nContent-Length: 1000000000000\r\n\r\n"
    async with serving(partial(endless, head=head)) as url, open_client() as http:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(PeerHttpError) as error:
                await http.request("GET", url, timeout_s=2 * PATIENCE_S)
        assert error.value.status == 500 and len(str(error.value)) < 3000


@pytest.mark.parametrize(
    "head",
    [
        OK + b"X: ",
        OK + b"X: y\r\n" * 100_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"X: y\r\n" * 100_000,
    ],
    ids=["one", "many", "informational", "trailers"],
)
async def test_endless_headers_are_refused(head: bytes) -> None:
    async with serving(partial(endless, head=head)) as url, open_client() as http:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ConnectionLost, match="header"):
                await http.request("GET", url, timeout_s=2 * PATIENCE_S)


async def test_a_redirection_is_an_error_and_is_not_followed() -> None:
    async with talking([HELLO]) as other:
        moved = b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n"
        async with talking([moved % other.url.encode()]) as peer, open_client() as http:
            with pytest.raises(PeerHttpError) as error:
                await read(http, peer)
        assert error.value.status == 302 and not other.requests


async def test_an_error_response_has_bounded_fields_of_the_right_types() -> None:
    long = "x" * 50_000
    body = msgspec.json.encode({"error": {"message": long, "code": long, "param": {"a": [long]}}})
    answer = b"HTTP/1.1 503 No\r\nRetry-After: %b\r\nContent-Length: %d\r\n\r\n%b"
    whole = answer % (b"9" * 400, len(body), body)
    async with talking([whole]) as peer, open_client() as http:
        with pytest.raises(PeerHttpError) as error:
            await read(http, peer)
    found = error.value
    assert len(found.message) < 3000 and len(found.code) < 200 and found.param is None
    assert found.retry_after_s is not None and math.isfinite(found.retry_after_s)


async def test_a_url_with_a_fragment_is_refused() -> None:
    async with talking([HELLO]) as peer, open_client() as http:
        with pytest.raises(ConnectionLost, match="URL"):
            await http.request("GET", f"{peer.url}/secret#/v1/match", timeout_s=20)
        assert not peer.requests


async def test_a_long_body_in_parts_arrives_whole_and_in_order() -> None:
    parts = (b"{" * 70_000, memoryview(bytes(range(256)) * 20_000), b"", b"}")
    async with talking([HELLO], [HELLO]) as server, open_client() as http:
        for body in (parts, b"".join(parts)):
            answer = await http.request("POST", server.url, timeout_s=PATIENCE_S, body=body)
            assert answer == b"hello"
            head, _, sent = server.requests.pop().partition(b"\r\n\r\n")
            assert sent == b"".join(parts) and b"Content-Length: %d" % len(sent) in head
        assert server.connections == 1


async def test_a_response_before_the_end_of_the_request_closes_the_connection() -> None:
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}")
        await asyncio.Event().wait()  # the body is not read

    body = (memoryview(bytes(60_000_000)),)
    async with serving(refuse) as url, open_client() as http:
        for _ in range(2):
            with pytest.raises(PeerHttpError) as refused:
                await http.request("POST", url, timeout_s=PATIENCE_S, body=body)
            assert refused.value.status == 413
    assert connections == 2
