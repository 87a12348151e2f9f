"""Calls over real sockets, to a server that says exactly what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConnectionLost
from prfaas.http_client import client as client_module
from prfaas.http_client.client import HttpClient, PeerHttpError, calling
from tests.gateway.backs import until

OK = b"HTTP/1.1 200 OK\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"


class Peer:
    """Answers each request with the next of `answers`, in the pieces given; then says no more."""

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
                    await writer.wait_closed()  # aborting might take back what was said
                    break
        self.open -= 1


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """Its URL. In the end nothing of it is left."""
    running: set[asyncio.Task[None]] = set()

    async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:
            pass  # by us, in the end; asyncio would log an error of a handler that was cancelled
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


async def read(calls: HttpClient, peer: Peer, *, timeout_s: float = 20.0) -> bytes:
    return await calls.read("GET", f"{peer.url}/x", timeout_s)


async def test_a_request_on_the_wire() -> None:
    async with talking([HELLO]) as peer, calling("secret") as calls:
        answer = await calls.read("POST", f"{peer.url}/v1/a?b=1", 20, b"{}", {"X-Request-Id": "7"})
        assert answer == b"hello"
        host = peer.url.removeprefix("http://")
        (said,) = peer.requests
        assert said.decode() == (
            f"POST /v1/a?b=1 HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret\r\n"
            "X-Request-Id: 7\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )


framings = st.sampled_from(["length", "chunked", "until the end"])


@given(framings, st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=8), st.data())
async def test_however_an_answer_is_framed_and_cut(
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

    async with talking(pieces, closes=framing == "until the end") as peer, calling() as calls:
        assert await read(calls, peer) == body


async def test_connections_are_used_again() -> None:
    async with talking(*[[HELLO]] * 4) as peer, calling() as calls:
        for _ in range(3):
            assert await read(calls, peer) == b"hello"
        assert peer.connections == 1


@pytest.mark.parametrize(
    "first",
    [
        OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello",
        HELLO + b"and more",  # nobody asked
    ],
)
async def test_connections_that_are_not(first: bytes) -> None:
    async with talking([first], [HELLO]) as peer, calling() as calls:
        assert await read(calls, peer) == b"hello"
        await until(lambda: peer.open == 0)
        assert await read(calls, peer) == b"hello"
        assert peer.connections == 2


async def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_S", 0.01)

    async with talking([HELLO]) as peer, calling() as calls:
        await read(calls, peer)
        await until(lambda: peer.open == 0)


async def test_hints_before_the_answer_are_passed_over() -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with talking([hint, HELLO]) as peer, calling() as calls:
        assert await read(calls, peer) == b"hello"


@pytest.mark.parametrize(
    ("pieces", "closes", "said"),
    [
        ([], True, "closed by the peer"),
        ([OK], True, "closed by the peer"),
        ([HELLO[:-1]], True, "closed by the peer"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"], True, "closed by the peer"),
        ([b"220 mail.example.org ESMTP\r\n"], False, "does not speak HTTP"),
        ([], False, "no answer in time"),
        ([HELLO[:-1]], False, "no answer in time"),
    ],
)
async def test_an_answer_that_does_not_come(pieces: list[bytes], closes: bool, said: str) -> None:
    async with talking(pieces, closes=closes) as peer, calling() as calls:
        with pytest.raises(ConnectionLost, match=said):
            await read(calls, peer, timeout_s=20.0 if "time" not in said else 0.05)
        await until(lambda: peer.open == 0)


def test_silence_is_bounded_and_speech_is_not() -> None:
    """Ten pieces in six times the bound; then nothing. The clock is moved, not waited for."""
    bound_s, pieces = 100.0, 10
    took: list[asyncio.Event] = []

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
        for taken in took:
            writer.write(b"1\r\na\r\n")
            await taken.wait()
        await asyncio.Event().wait()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MovedLoop)
        took.extend(asyncio.Event() for _ in range(pieces))
        async with serving(speak) as url, calling() as calls:
            async with await calls.send("GET", url, silence_s=bound_s) as exchange:
                await exchange.accepted()
                for taken in took:
                    assert await exchange.more() == b"a"
                    loop.move(0.6 * bound_s)
                    taken.set()
                loop.move(bound_s)
                with pytest.raises(ConnectionLost, match="no answer in time"):
                    await exchange.more()

    # Not an async test: this test needs an event loop of another class.
    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(main())


class MovedLoop(asyncio.SelectorEventLoop):
    """Its clock can be moved forwards."""

    _moved_s = 0.0

    def time(self) -> float:
        return super().time() + self._moved_s

    def move(self, seconds: float) -> None:
        self._moved_s += seconds


async def test_who_does_not_read_holds_the_peer_back() -> None:
    """What nobody takes stays with the sender: kernels hold a few MB, the client one more."""
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

    async with serving(pour) as url, calling() as calls:
        async with await calls.send("GET", url, silence_s=20) as exchange:
            await exchange.accepted()
            before = -1
            while before != sent:  # until it is held back
                before = sent
                await asyncio.sleep(0.1)
            assert sent < total
            assert len(await exchange.rest()) == total


async def test_who_stops_reading_ends_the_connection() -> None:
    async with talking([HELLO[:-1]], [HELLO]) as peer, calling() as calls:
        reading = asyncio.create_task(read(calls, peer))
        await until(lambda: bool(peer.requests))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: peer.open == 0)
        assert await read(calls, peer) == b"hello"


async def test_errors_in_both_shapes() -> None:
    openai = b'{"error":{"message":"no","code":"full","param":"prompt"}}'
    problem = b'{"code":"gone","message":"it was here"}'
    for body, code in ((openai, "full"), (problem, "gone"), (b"<html>", "")):
        answer = b"HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n%b"
        async with talking([answer % (len(body), body)], [HELLO]) as peer, calling() as calls:
            with pytest.raises(PeerHttpError) as said:
                await read(calls, peer)
            assert (said.value.status, said.value.code) == (503, code)
            assert said.value.retry_after_s == 7
            assert await read(calls, peer) == b"hello"
            assert peer.connections == 1, "an error that was read leaves the connection whole"


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
        "http://127.0.0.1:1/",  # nobody listens
    ],
)
async def test_urls_that_lead_nowhere(url: str) -> None:
    async with calling() as calls:
        with pytest.raises(ConnectionLost):
            await calls.read("GET", url, 20)


async def test_a_header_is_one_line() -> None:
    async with talking([HELLO]) as peer, calling() as calls:
        with pytest.raises(ValueError, match="X-Request-Id"):
            await calls.read("GET", peer.url, 20, b"", {"X-Request-Id": "a\r\nHost: b"})
