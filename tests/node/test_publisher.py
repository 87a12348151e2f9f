from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from prfaas.errors import InputError
from prfaas.node.kv_events.publisher import KEPT_BYTES, EventPublisher, open_publisher
from tests.waiting import HANG_S

ANY = "tcp://127.0.0.1:0"
EVENT = {"type": "AllBlocksCleared"}


def numbered(frames: list[bytes]) -> tuple[int, list[object]]:
    _, number, batch = frames
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1]


async def replayed(publisher: EventPublisher, first: int) -> list[int]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        await dealer.send_multipart([b"only", b"two frames", b"are understood"])
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        numbers: list[int] = []
        while True:
            empty, number, batch = await dealer.recv_multipart()
            assert empty == b""
            if not batch:
                assert int.from_bytes(number, "big", signed=True) == -1
                return numbers
            numbers.append(int.from_bytes(number, "big"))


async def test_batches_are_numbered_and_replayed() -> None:
    async with open_publisher(ANY, ANY) as publisher, asyncio.timeout(HANG_S):
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.subscribe(b"")
            subscriber.connect(publisher.endpoint)
            publisher.publish([])  # an empty batch takes no number
            first = asyncio.ensure_future(subscriber.recv_multipart())
            while not first.done():  # a subscription takes effect some time after `connect`
                publisher.publish([EVENT])
                await asyncio.wait([first], timeout=0.01)
            seen, events = numbered(first.result())
            assert events == [EVENT]
            publisher.publish([EVENT, EVENT])
            last, events = numbered(await subscriber.recv_multipart())
            while len(events) == 1:
                last, events = numbered(await subscriber.recv_multipart())
            assert last > seen
        assert await replayed(publisher, 0) == list(range(last + 1))
        assert await replayed(publisher, last) == [last]
        assert await replayed(publisher, last + 1) == []


async def test_an_address_that_cannot_be_had_is_named() -> None:
    with pytest.raises(InputError, match="tcp://nowhere"):
        async with open_publisher(ANY, "tcp://nowhere"):
            pass


async def test_what_is_kept_for_replays_is_bounded_in_bytes() -> None:
    long = {"type": "BlockStored", "token_ids": [2**31] * 100_000}  # five bytes each
    async with open_publisher(ANY, ANY) as publisher, asyncio.timeout(HANG_S):
        for _ in range(50):
            publisher.publish([long])
        kept = await replayed(publisher, 0)
        assert kept[-1] == 49 and len(kept) == KEPT_BYTES // 500_000
