"""What `bench/quick.py` compares this project's speeds with: work of the same nature that none of
its code takes part in. A slow or busy machine slows both. What one process computes alone is
measured in CPU time where it takes longer than a process's turn on a core.

\b
    python bench/_yardsticks.py PORT                an HTTP server that sends back what it receives

The yardsticks of transfers are pairs of sockets (`_transport_ssl_pair.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

TIMEOUT_S = 60.0
_EVENTS = 60_000
_QUEUED = 1_000


def chain_ms(data: bytes, block_bytes: int) -> float:
    """A chain of SHA-256 over the blocks of `data`."""
    began_s = time.perf_counter()
    digest = b""
    for at in range(0, len(data), block_bytes):
        digest = hashlib.sha256(digest + data[at : at + block_bytes]).digest()
    return (time.perf_counter() - began_s) * 1e3


def loop_events_per_s() -> float:
    """Pure Python, per second of CPU time: events with a time each, in a queue from which the next
    one is taken."""
    queue = [(float(number), number) for number in range(_QUEUED)]
    counts = dict.fromkeys(range(_QUEUED), 0)
    began_s = time.process_time()
    for _ in range(_EVENTS):
        at_s, number = heapq.heappop(queue)
        counts[number] += 1
        heapq.heappush(queue, (at_s + 1.0 + number % 7, number))
    return _EVENTS / (time.process_time() - began_s)


def process_ms(arguments: Sequence[str]) -> float:
    """CPU time of Python from its start to its end. It may keep compiled code, as for a user."""
    command = [sys.executable, *arguments]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s * 1e3


# The HTTP server ----------------------------------------------------------------------------------

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Plain asyncio. Like a gateway, the server computes more than its client: where hardware
    threads share a core, a busy neighbour slows both servers alike."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            asked = json.loads(await reader.readexactly(length))
            event = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(asked).encode()
            writer.write(_HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has closed the connection
    finally:
        writer.close()


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
