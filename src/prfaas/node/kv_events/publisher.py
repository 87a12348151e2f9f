"""KV events over ZMQ in vLLM's format: a PUB socket with numbered batches, a ROUTER for replays.

PUB      [topic, number (8 bytes, big endian), [timestamp, [event, ...], rank]]
replay   a DEALER or REQ sends [b"", first number], and gets [b"", number, batch] for each batch
         that is still kept, then [b"", -1, b""]
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prfaas.clock import MonotonicClock
from prfaas.errors import InputError
from prfaas.supervision import Failures, repeat

TOPIC = b"kv"
KEPT_BATCHES = 10_000  # vLLM's default
KEPT_BYTES = 4 << 20  # a batch has its blocks' tokens: half a megabyte for a long prompt
_END = (-1).to_bytes(8, "big", signed=True)
_RANK = 0
_RETRY_S = 1.0
_LOG = logging.getLogger(__name__)


class EventPublisher:
    """Made by `open_publisher`. Call `publish` from the event loop only."""

    def __init__(self, pub: zmq.Socket[bytes], replay: zmq.asyncio.Socket) -> None:
        self._pub = pub
        self._replay = replay
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0

    @property
    def endpoint(self) -> str:
        return _last_endpoint(self._pub)

    @property
    def replay_endpoint(self) -> str:
        return _last_endpoint(self._replay)

    def publish(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        batch = msgspec.msgpack.encode([time.time(), events, _RANK])
        self._kept.append((self._next, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        # A PUB socket never waits: a slow reader loses batches, sees the gap and requests a replay.
        self._pub.send_multipart((TOPIC, self._next.to_bytes(8, "big"), batch))
        self._next += 1

    async def serve_replays(self) -> None:
        """Until cancelled. No request ends it."""
        failures = Failures(MonotonicClock())
        await repeat(self._serve_replay, 0.0, failures, loop="replays", retry_s=_RETRY_S)

    async def _serve_replay(self) -> None:
        identity, *request = await self._replay.recv_multipart()
        if len(request) != 2 or len(request[1]) != 8:
            _LOG.warning("ignored a malformed replay request of %d frames", len(request))
            return
        first = int.from_bytes(request[1], "big")
        for number, batch in list(self._kept):
            if number >= first:
                frames = (identity, b"", number.to_bytes(8, "big"), batch)
                await self._replay.send_multipart(frames)
        await self._replay.send_multipart((identity, b"", _END, b""))


@asynccontextmanager
async def open_publisher(endpoint: str, replay_endpoint: str) -> AsyncIterator[EventPublisher]:
    """Binds both endpoints. Port 0 takes any free port."""
    with (
        zmq.Context() as context,
        zmq.asyncio.Context() as waiting_context,
        context.socket(zmq.PUB) as pub,
        waiting_context.socket(zmq.ROUTER) as replay,
    ):
        pub.linger = replay.linger = 0
        for socket, address in ((pub, endpoint), (replay, replay_endpoint)):
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise InputError(
                    f"cannot listen: {error}", where=address, fix="use tcp://HOST:PORT"
                ) from None
        publisher = EventPublisher(pub, replay)
        replaying = asyncio.create_task(publisher.serve_replays())
        try:
            yield publisher
        finally:
            replaying.cancel()
            await asyncio.gather(replaying, return_exceptions=True)


def _last_endpoint(socket: zmq.Socket[Any]) -> str:
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
