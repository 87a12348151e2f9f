"""Streams of scenes: one encoding for all, bounded queues, and an end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from prfaas.console.scene import Scene
from prfaas.errors import RequestError
from prfaas.gateway.console import feed as feed_module
from prfaas.gateway.console.deltas import Delta, apply
from prfaas.gateway.console.feed import MOST_QUEUED, MOST_WATCHERS, Feed, Opening, Watcher
from prfaas.gateway.console.recent import RecentRequests
from prfaas.gateway.following.kept_requests import RequestHistory
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import until
from tests.gateway.console.made_scenes import HOSTILE, MadeScenes, node, scene
from tests.gateway.console.test_events import with_link, with_node


def parsed(message: bytes) -> tuple[str, Any]:
    """The name and the data of an event."""
    lines = [line for line in message.decode().split("\n") if line]
    fields = dict(line.split(": ", 1) for line in lines)
    kinds: dict[str, Any] = {"scene": Opening, "delta": Delta}
    kind = fields["event"]
    return kind, msgspec.json.decode(fields["data"], type=kinds[kind])


class Made:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.source = MadeScenes()
        self.recent = RecentRequests(self.clock, RequestHistory(self.clock))
        self.feed = Feed(
            self.source,
            self.recent,
            self.clock,
            lambda: {"tenants": ["acme"], "login": True},
            epoch=self.clock.now,
        )
        self.aborted = 0

    def open(self, allowed: bool = True) -> Watcher:
        return self.feed.open(lambda: allowed, self.abort)

    def abort(self) -> None:
        self.aborted += 1


async def test_a_scene_and_the_deltas_after_it_are_the_latest_scene() -> None:
    made = Made()
    early, late = made.open(), None
    shown = parsed(early.first)[1].scene
    lost = with_node(scene(), node(2, status="lost", why=HOSTILE))
    changes = [lost, with_link(lost, verdict="cut"), scene(homes=()), scene(), lost]
    for second, now in enumerate(changes):
        made.source.now = now
        made.clock.advance(1.0)
        made.feed.step()
        kind, data = parsed(await early.next() or b"")
        shown = data.scene if kind == "scene" else apply(shown, data)
        assert (shown.clusters, shown.links, shown.homes) == (now.clusters, now.links, now.homes)
        assert kind == ("scene" if second in (2, 3) else "delta"), "homes are not in deltas"
        if second == 1:
            late = made.open()
            assert parsed(late.first)[1].scene == shown, "it continues from the same scene"
    assert late is not None
    opening = parsed(made.open().first)[1]
    assert opening.tenants == ["acme"] and opening.login
    assert [event.text for event in opening.events][:2] == [
        f"n2 of far is lost: {HOSTILE}.",
        "The link far -> pd is cut.",
    ]


async def test_messages_are_encoded_once() -> None:
    made = Made()
    watchers = [made.open() for _ in range(10)]
    assert len({id(watcher.first) for watcher in watchers}) == 1 and made.source.made == 1
    made.feed.step()
    messages = [await watcher.next() for watcher in watchers]
    assert len({id(message) for message in messages}) == 1 and made.source.made == 2


async def test_a_console_that_does_not_read_is_closed() -> None:
    made = Made()
    slow, quick = made.open(), made.open()
    for _ in range(MOST_QUEUED + 5):
        made.feed.step()
        assert await quick.next() is not None
    assert made.aborted == 1 and made.feed.watchers == 1
    kept = 0
    while slow._queue.qsize():
        kept += 1
        await slow.next()
    assert kept <= MOST_QUEUED + 1


async def test_too_many_consoles_are_refused() -> None:
    made = Made()
    watchers = [made.open() for _ in range(MOST_WATCHERS)]
    with pytest.raises(RequestError, match="32 consoles are open") as refused:
        made.open()
    assert refused.value.status == 503
    made.feed.close(watchers[0])
    made.feed.close(watchers[0])
    made.open()


async def test_a_stream_ends_with_its_session() -> None:
    made = Made()
    ended, stays = made.open(allowed=False), made.open()
    made.feed.step()
    assert await ended.next() is None and await stays.next() is not None
    assert made.feed.watchers == 1


async def test_explanations_are_wanted_while_a_console_is_open() -> None:
    made = Made()
    assert not made.source.wanted()
    watcher = made.open()
    assert made.source.wanted()
    made.feed.close(watcher)
    assert not made.source.wanted()


async def test_scenes_are_made_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "EVERY_S", 0.001)
    made = Made()
    async with made.feed.running():
        await until(lambda: made.source.made > 0)
        watcher = made.open()
        for _ in range(3):
            assert parsed(await watcher.next() or b"")[0] == "delta"
        last = made.open()
    while await watcher.next() is not None:
        pass
    while await last.next() is not None:
        pass
    with pytest.raises(RequestError, match="stopping"):
        made.open()


async def test_a_failing_scene_does_not_end_the_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed_module, "EVERY_S", 0.001)
    made = Made()

    def fail(*_: object) -> Scene:
        raise ValueError("a defect")

    async with asyncio.timeout(30), made.feed.running():
        watcher = made.open()
        working = made.source.scene
        monkeypatch.setattr(made.source, "scene", fail)
        await until(lambda: "a defect" in caplog.text)
        monkeypatch.setattr(made.source, "scene", working)
        assert await watcher.next() is not None
