"""Many light node processes that answer a request when the benchmark says so.

\b
    python bench/_held_node.py COUNT UDP_PORT

Each of the COUNT processes is a node and its kvd in one (`_null_node.py`). They are forks of this
process, so that a hundred of them take little memory. A process reports every prefill, commit and
decode that reaches it to the benchmark's UDP port as `KIND KEY NAME PID`, and holds its response
until the benchmark sends `KIND KEY` back. Prints one line `NAME PORT PID` for each process, and
ends all of them at the end of its standard input.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from typing import cast

from _null_node import Host, Http

_PROMPT = re.compile(rb'"prompt":\[(\d+)')
_TRANSFER = re.compile(rb'"transfer_id":"([^"]+)"')


class Wire(asyncio.DatagramProtocol):
    """Reports what has arrived, and receives what may be answered."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._to = ("127.0.0.1", port)
        self._held: dict[bytes, list[asyncio.Future[None]]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: object) -> None:
        for held in self._held.pop(data, []):
            if not held.done():
                held.set_result(None)

    def hold(self, key: bytes) -> asyncio.Future[None]:
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.setdefault(key, []).append(held)
        self._transport.sendto(b"%b %b %d" % (key, self._name.encode(), os.getpid()), self._to)
        return held


class HeldHttp(Http):
    """Requests of one connection come one at a time, so that a held response blocks no other."""

    def __init__(self, host: Host, wire: Wire) -> None:
        super().__init__(host)
        self._wire = wire
        self._latest = b""

    def data_received(self, data: bytes) -> None:
        self._latest = data if not self._held else self._latest + data
        super().data_received(data)

    def _write(self, answer: bytes) -> None:
        request = self._latest
        key = b""
        if request.startswith(b"POST /v1/completions"):
            if b'"stream":true' in request:
                found = _PROMPT.search(request)
                key = b"decode " + (found[1] if found else b"?")
            else:
                found = _TRANSFER.search(request)
                key = b"prefill " + (found[1] if found else b"?")
        elif request.startswith(b"GET /v1/transfers/"):
            key = b"commit " + request.split(b"?", 1)[0].rsplit(b"/", 1)[1]
        if not key:
            super()._write(answer)
            return
        self._wire.hold(key).add_done_callback(lambda _: Http._write(self, answer))


async def serve(name: str, listening: socket.socket, udp_port: int) -> None:
    loop = asyncio.get_running_loop()
    host = Host(name, listening.getsockname()[1])
    _, wire = await loop.create_datagram_endpoint(
        lambda: Wire(name, udp_port), local_addr=("127.0.0.1", 0)
    )
    await loop.create_server(lambda: HeldHttp(host, wire), sock=listening)
    await asyncio.Event().wait()


def main(count: int, udp_port: int) -> None:
    children: list[int] = []
    try:
        for number in range(count):
            name, listening = f"n{number:03}", socket.create_server(("127.0.0.1", 0), backlog=256)
            pid = os.fork()
            if pid == 0:
                asyncio.run(serve(name, listening, udp_port))
            children.append(pid)
            print(name, listening.getsockname()[1], pid, flush=True)
            listening.close()
        sys.stdin.read()
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
