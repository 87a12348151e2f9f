"""Polls the kvd's cache events and publishes them in vLLM's format while the node runs."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.clock import MonotonicClock
from prfaas.contracts.kvd_api import SNAPSHOT, EventPage
from prfaas.http_client.client import HttpClient
from prfaas.node.kv_events.publisher import EventPublisher
from prfaas.node.kv_events.translator import EventTranslator
from prfaas.supervision import Failures, repeat
from prfaas.types import BlockHash, HashEvent

RETRY_S = 1.0


class EventFollower:
    def __init__(self, http: HttpClient, kvd_url: str, poll_s: float) -> None:
        self._http = http
        self._url = f"{kvd_url}/v1/events"
        self._poll_s = poll_s

    async def follow(self, translator: EventTranslator, publisher: EventPublisher) -> None:
        """Until cancelled. No page of the kvd ends it."""
        instance, since = "", SNAPSHOT

        async def step() -> None:
            nonlocal instance, since
            page = await self._page(since)
            if page.instance != instance and since != SNAPSHOT:
                since = SNAPSHOT  # the kvd has restarted and numbers its events anew
                instance = page.instance
                return
            instance, since = page.instance, page.next_seq
            publisher.publish(translate_page(translator, page))

        failures = Failures(MonotonicClock())
        peer = "cannot read cache events from the kvd"
        await repeat(step, 0.0, failures, loop="cache events", peer=peer, retry_s=RETRY_S)

    async def _page(self, since: int) -> EventPage:
        url = f"{self._url}?since={since}&wait_s={self._poll_s:g}"
        return await self._http.request_json("GET", url, EventPage, timeout_s=2 * self._poll_s)


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
