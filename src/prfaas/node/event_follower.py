"""Polls the kvd's cache events and publishes them in vLLM's format while the node runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prfaas.contracts.kvd_api import SNAPSHOT, EventPage
from prfaas.errors import PeerError
from prfaas.http_client.client import HttpClient
from prfaas.node.events import EventTranslator
from prfaas.node.publisher import EventPublisher
from prfaas.types import BlockHash, HashEvent

WAIT_S = 30.0  # of one long poll
RETRY_S = 1.0
_LOG = logging.getLogger(__name__)


class EventFollower:
    def __init__(self, http: HttpClient, kvd_url: str) -> None:
        self._http = http
        self._url = f"{kvd_url}/v1/events"

    async def follow(self, translator: EventTranslator, publisher: EventPublisher) -> None:
        instance, since = "", SNAPSHOT
        while True:
            try:
                page = await self._page(since)
            except PeerError as error:
                _LOG.warning("cannot read cache events from the kvd: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if page.instance != instance and since != SNAPSHOT:
                since = SNAPSHOT  # the kvd has restarted and numbers its events anew
                instance = page.instance
                continue
            instance, since = page.instance, page.next_seq
            publisher.publish(translate_page(translator, page))

    async def _page(self, since: int) -> EventPage:
        url = f"{self._url}?since={since}&wait_s={WAIT_S:g}"
        return await self._http.request_json("GET", url, EventPage, timeout_s=2 * WAIT_S)


def translate_page(translator: EventTranslator, page: EventPage) -> list[dict[str, object]]:
    if page.snapshot is None:
        return [event for one in page.events for event in translator.translate(one)]
    events = translator.cleared()
    for group, hashes in page.snapshot.items():
        stored = HashEvent(
            page.next_seq, page.node, group, translator.block_tokens, hashes, "stored"
        )
        events += translator.translate(stored)
    return events


class PromptListener:
    """Passes each prompt to the translator and publishes the events that were waiting for it."""

    def __init__(self, translator: EventTranslator, publisher: EventPublisher) -> None:
        self._translator = translator
        self._publisher = publisher

    def __call__(self, tokens: Sequence[int], hashes: Sequence[BlockHash], salt: str) -> None:
        self._publisher.publish(self._translator.learn(tokens, hashes, salt))
