"""Polls the kvd's cache events and publishes them in vLLM's format while the node runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp
import msgspec

from prfaas.kvd.events import EventPage
from prfaas.node.events import EventTranslator
from prfaas.node.publisher import EventPublisher
from prfaas.types import BlockHash, HashEvent

WAIT_S = 30.0  # of one long poll
RETRY_S = 1.0
_SNAPSHOT = -1  # asks for a snapshot
_LOG = logging.getLogger(__name__)


class EventFollower:
    def __init__(self, session: aiohttp.ClientSession, kvd_url: str) -> None:
        self._session = session
        self._url = f"{kvd_url}/v1/events"

    async def follow(self, translator: EventTranslator, publisher: EventPublisher) -> None:
        instance, since = "", _SNAPSHOT
        while True:
            try:
                page = await self._page(since)
            except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
                _LOG.warning("cannot read cache events from the kvd: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if page.instance != instance and since != _SNAPSHOT:
                since = _SNAPSHOT  # the kvd has restarted and numbers its events anew
                instance = page.instance
                continue
            instance, since = page.instance, page.next_seq
            publisher.publish(translate_page(translator, page))

    async def _page(self, since: int) -> EventPage:
        query = {"since": str(since), "wait_s": f"{WAIT_S:g}"}
        timeout = aiohttp.ClientTimeout(total=2 * WAIT_S)
        async with self._session.get(self._url, params=query, timeout=timeout) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=EventPage)


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
