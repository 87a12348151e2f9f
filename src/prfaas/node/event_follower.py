"""Follows the kvd's cache events and publishes them in vLLM's format, as long as the node lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prfaas.errors import PeerError
from prfaas.http_client.client import HttpClient
from prfaas.kvd.events import EventPage
from prfaas.node.events import Announcer
from prfaas.node.publisher import EventPublisher
from prfaas.types import BlockHash, HashEvent

WAIT_S = 30.0  # of one long poll
RETRY_S = 1.0
_SNAPSHOT = -1  # what to ask for when nothing is known
_LOG = logging.getLogger(__name__)


class EventFollower:
    def __init__(self, http: HttpClient, kvd_url: str) -> None:
        self._http = http
        self._url = f"{kvd_url}/v1/events"

    async def follow(self, announcer: Announcer, publisher: EventPublisher) -> None:
        instance, since = "", _SNAPSHOT
        while True:
            try:
                page = await self._page(since)
            except PeerError as error:
                _LOG.warning("no cache events from the kvd: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if page.instance != instance and since != _SNAPSHOT:
                since = _SNAPSHOT  # another process: its numbers mean something else
                instance = page.instance
                continue
            instance, since = page.instance, page.next_seq
            publisher.publish(translated(announcer, page))

    async def _page(self, since: int) -> EventPage:
        url = f"{self._url}?since={since}&wait_s={WAIT_S:g}"
        return await self._http.request_json("GET", url, EventPage, timeout_s=2 * WAIT_S)


def translated(announcer: Announcer, page: EventPage) -> list[dict[str, object]]:
    if page.snapshot is None:
        return [event for one in page.events for event in announcer.translate(one)]
    events = announcer.cleared()
    for group, hashes in page.snapshot.items():
        stored = HashEvent(
            page.next_seq, page.node, group, announcer.block_tokens, hashes, "stored"
        )
        events += announcer.translate(stored)
    return events


class Learner:
    """What `serving` tells of each prompt reaches the announcer, and what it owed is published."""

    def __init__(self, announcer: Announcer, publisher: EventPublisher) -> None:
        self._announcer = announcer
        self._publisher = publisher

    def __call__(self, tokens: Sequence[int], hashes: Sequence[BlockHash], salt: str) -> None:
        self._publisher.publish(self._announcer.learn(tokens, hashes, salt))
