"""An OTLP collector that takes every batch of spans and forgets it. It counts their bytes.

python bench/_otlp_sink.py PORT
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import cast

import uvloop

_TAKEN = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"


class Counter:
    nbytes = 0


class Http(asyncio.Protocol):
    """Requests come one at a time, with a Content-Length. A GET is told the bytes so far."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._held = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._held[:end]).lower()
            _, _, value = head.partition(b"content-length:")
            length = int(value.split(b"\r\n", 1)[0]) if value else 0
            if len(self._held) < end + 4 + length:
                return
            del self._held[: end + 4 + length]
            self._counter.nbytes += length
            if head.startswith(b"get "):
                text = str(self._counter.nbytes).encode()
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)
                )
            else:
                self._transport.write(_TAKEN)


async def serve(port: int) -> None:
    make = partial(Http, Counter())
    await asyncio.get_running_loop().create_server(make, "127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))
