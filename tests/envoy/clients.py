"""Clients of the proxy over TLS: HTTP/1.1 with a connection for each request, and HTTP/2 with many
streams in a connection. Leaving a response before its end aborts it, as a closed browser tab does:
HTTP/1.1 closes the connection, HTTP/2 resets the stream and keeps the connection.

httpx is not used: it leaves an HTTP/2 stream open whose response it does not want any more.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h11

from tests.waiting import PATIENCE_S

READ_BYTES = 1 << 16
PATH = "/v1/completions"
HOST = "127.0.0.1"  # in the certificate of the proxy


class CutOff(Exception):
    """The response ended before its end."""


class Response(Protocol):
    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """As they arrive. Raises `CutOff`."""


class Client(Protocol):
    def post(
        self, body: bytes, headers: Mapping[str, str], path: str = PATH
    ) -> AbstractAsyncContextManager[Response]: ...


class Http1Response:
    """One response, which has its connection to itself."""

    def __init__(self, reader: asyncio.StreamReader, parser: h11.Connection) -> None:
        self._reader = reader
        self._parser = parser
        self.status = 0
        self.headers: Mapping[str, str] = {}

    async def begin(self) -> None:
        response = await self._next()
        assert isinstance(response, h11.Response), response
        self.status = response.status_code
        self.headers = {name.decode(): value.decode() for name, value in response.headers}

    async def chunks(self) -> AsyncIterator[bytes]:
        while isinstance(part := await self._next(), h11.Data):
            yield bytes(part.data)

    async def _next(self) -> object:
        while True:
            try:
                event = self._parser.next_event()
                if event is not h11.NEED_DATA:
                    return event
                self._parser.receive_data(await self._reader.read(READ_BYTES))
            except (h11.RemoteProtocolError, ConnectionError) as error:
                raise CutOff(str(error)) from None


class Http1Client:
    def __init__(self, port: int, trust: ssl.SSLContext) -> None:
        self._port = port
        self._trust = trust

    @asynccontextmanager
    async def post(
        self, body: bytes, headers: Mapping[str, str], path: str = PATH
    ) -> AsyncIterator[Response]:
        reader, writer = await asyncio.open_connection(HOST, self._port, ssl=self._trust)
        parser = h11.Connection(h11.CLIENT)
        fields = {"Host": HOST, "Content-Length": str(len(body)), **headers}
        request = h11.Request(method="POST", target=path, headers=list(fields.items()))
        response = Http1Response(reader, parser)
        try:
            for part in (request, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(parser.send(part) or b"")
            with suppress(ConnectionError):  # the response says why
                await writer.drain()
            await response.begin()
            yield response
        finally:
            await _close(writer)


class Http2Stream:
    """One request of an HTTP/2 connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.over = False
        self._parts: asyncio.Queue[bytes | CutOff | None] = asyncio.Queue()
        self.answered = asyncio.Event()

    def add(self, part: bytes | CutOff | None) -> None:
        """None: the end."""
        self.over = self.over or not isinstance(part, bytes)
        self.answered.set()
        self._parts.put_nowait(part)

    async def chunks(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            if isinstance(part, CutOff):
                raise part
            yield part


class Http2Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self._streams: dict[int, Http2Stream] = {}
        self._settled = asyncio.Event()  # the proxy has sent its limits
        self._window = asyncio.Event()  # the proxy takes more bytes of bodies

    @asynccontextmanager
    async def post(
        self, body: bytes, headers: Mapping[str, str], path: str = PATH
    ) -> AsyncIterator[Response]:
        async with asyncio.timeout(PATIENCE_S):
            await self._settled.wait()
        number, stream = self._h2.get_next_available_stream_id(), Http2Stream()
        fields = {":method": "POST", ":scheme": "https", ":authority": HOST, ":path": path}
        self._h2.send_headers(
            number, [*fields.items(), *((k.lower(), v) for k, v in headers.items())]
        )
        self._streams[number] = stream
        try:
            await self._send_body(number, body)
            await stream.answered.wait()
            if not stream.status:
                await anext(stream.chunks())  # raises the reason
            yield stream
        finally:
            del self._streams[number]
            if not stream.over:
                self._h2.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
                self._flush()

    async def _send_body(self, number: int, body: bytes) -> None:
        while body:
            window = self._h2.local_flow_control_window(number)
            part = body[: min(window, self._h2.max_outbound_frame_size)]
            if not part:
                self._window.clear()
                await self._window.wait()
                continue
            body = body[len(part) :]
            self._h2.send_data(number, part, end_stream=not body)
            self._flush()

    async def run(self) -> None:
        """Reads until the connection is closed."""
        self._h2.initiate_connection()
        self._flush()
        try:
            while data := await self._reader.read(READ_BYTES):
                for event in self._h2.receive_data(data):
                    self._handle(event)
                self._flush()
        finally:
            for stream in self._streams.values():
                stream.add(CutOff("the connection was closed"))

    def _handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RemoteSettingsChanged):
            self._settled.set()
        if isinstance(event, h2.events.WindowUpdated):
            self._window.set()
        if isinstance(event, h2.events.DataReceived):
            # Also for a stream that was left: its bytes count for the connection.
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        stream = self._streams.get(getattr(event, "stream_id", None) or 0)
        if stream is None:
            return
        match event:
            case h2.events.ResponseReceived():
                stream.headers = {str(name): str(value) for name, value in event.headers}
                stream.status = int(stream.headers[":status"])
                stream.answered.set()
            case h2.events.DataReceived():
                stream.add(event.data)
            case h2.events.StreamEnded():
                stream.add(None)
            case h2.events.StreamReset():
                stream.add(CutOff(f"the stream was reset: {event.error_code}"))

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())


@asynccontextmanager
async def http2_client(port: int, ca: str) -> AsyncIterator[Http2Client]:
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
    chosen = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    assert chosen == "h2", chosen
    client = Http2Client(reader, writer)
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):  # the proxy may have closed the connection already
        await writer.wait_closed()
