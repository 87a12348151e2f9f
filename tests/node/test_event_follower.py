from __future__ import annotations

import asyncio

from prfaas.contracts.kvd_api import EventPage
from prfaas.http_client.client import open_client
from prfaas.node.kv_events.follower import EventFollower
from prfaas.node.kv_events.publisher import open_publisher
from prfaas.node.kv_events.translator import EventTranslator
from prfaas.types import HashEvent, NodeId
from tests.cache.builders import BLOCK, SPECS
from tests.gateway.peers import peer
from tests.waiting import HANG_S

ANY = "tcp://127.0.0.1:0"
EVENTS = "GET /v1/events"
NODE = NodeId("n")


async def test_a_page_that_cannot_be_translated_does_not_end_the_following() -> None:
    removed = HashEvent(0, NODE, "a group of another model", BLOCK, (b"h",), "removed")
    translator = EventTranslator(SPECS["all"], BLOCK)
    async with (
        asyncio.timeout(HANG_S),
        peer() as kvd,
        open_client() as http,
        open_publisher(ANY, ANY) as publisher,
    ):
        published = asyncio.Event()
        send = publisher.publish

        def observe(events: list[dict[str, object]]) -> None:
            send(events)
            published.set()

        publisher.publish = observe  # type: ignore[method-assign]
        await kvd.script(EVENTS, EventPage(NODE, "i", 1, (removed,)))
        following = asyncio.create_task(
            EventFollower(http, kvd.url, poll_s=1.0).follow(translator, publisher)
        )
        await kvd.requested(EVENTS)
        await kvd.script(EVENTS, EventPage(NODE, "i", 2, snapshot={}))
        await published.wait()
        assert not following.done()
        following.cancel()
        await asyncio.wait([following])
