"""The stream of scenes: made once a second while a console is open, and encoded once for all.

The first message of a stream has the whole scene and the kept events and requests; later ones have
what has changed (`deltas`). A console that does not read is closed, so that none holds more than a
few messages. Without a console a scene is made now and then, so that the time line has what
happened before the console was opened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from prfaas.clock import Clock
from prfaas.console.scene import EventScene, RequestScene, Scene
from prfaas.errors import RequestError
from prfaas.gateway.console.deltas import delta
from prfaas.gateway.console.events import EventLog
from prfaas.gateway.console.recent import RecentRequests
from prfaas.gateway.console.scenes import SceneSource
from prfaas.supervision import Failures

EVERY_S = 1.0
UNWATCHED_EVERY_S = 5.0
MOST_WATCHERS = 32
MOST_QUEUED = 16  # messages for one console that it has not read
RETRY_MS = 1000  # after which a browser connects again


class Opening(msgspec.Struct, frozen=True):
    """The data of the first message."""

    scene: Scene
    events: list[EventScene]
    requests: list[RequestScene]
    tenants: list[str]  # whose names the prompt box offers
    login: bool  # there is a session, which can be ended


class Watcher:
    """One open console."""

    def __init__(
        self, first: bytes, is_allowed: Callable[[], bool], abort: Callable[[], None]
    ) -> None:
        """`is_allowed`: whether its session has not ended. `abort` closes its connection."""
        self.first = first
        self.is_allowed = is_allowed
        self._abort = abort
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_QUEUED + 1)

    async def next(self) -> bytes | None:
        """The next message; None: the stream ends."""
        return await self._queue.get()

    def send(self, message: bytes) -> bool:
        """Returns False when the console is too slow. Then its connection is closed."""
        if self._queue.qsize() >= MOST_QUEUED:
            self._abort()
            return False
        self._queue.put_nowait(message)
        return True

    def end(self) -> None:
        """Ends the stream after the messages that are queued."""
        with suppress(asyncio.QueueFull):  # then it has been ended already
            self._queue.put_nowait(None)


class Feed:
    def __init__(
        self,
        source: SceneSource,
        recent: RecentRequests,
        clock: Clock,
        describe: Callable[[], dict[str, Any]],
        epoch: Callable[[], float] = time.time,
    ) -> None:
        """`describe` returns `tenants` and `login` of an `Opening`."""
        self._source = source
        self._recent = recent
        self._describe = describe
        self._epoch = epoch
        self._failures = Failures(clock)
        self._events = EventLog()
        self._watchers: list[Watcher] = []
        self._scene: Scene | None = None
        self._opening: bytes | None = None  # the first message with `_scene`
        self._opened = asyncio.Event()  # the first console has been opened
        self._ended = False
        source.explain_routes(recent.wants_explanation)

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Makes scenes for the time of the block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self.end()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def open(self, is_allowed: Callable[[], bool], abort: Callable[[], None]) -> Watcher:
        """Raises `RequestError` when too many consoles are open. The caller has to `close` it."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise RequestError(
                503,
                "too_many_consoles",
                f"{MOST_WATCHERS} consoles are open; close one of them",
                retry_after_s=UNWATCHED_EVERY_S,
            )
        if self._ended:
            raise RequestError(503, "shutting_down", "the gateway is stopping", retry_after_s=1.0)
        if not self._watchers:
            self.step()  # the latest scene may be some seconds old
        watcher = Watcher(self._first(), is_allowed, abort)
        self._watchers.append(watcher)
        self._recent.watched = True
        self._opened.set()
        return watcher

    def close(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        self._recent.watched = bool(self._watchers)

    def end(self) -> None:
        """Ends all streams, and accepts no more of them."""
        self._ended = True
        for watcher in list(self._watchers):
            watcher.end()
            self.close(watcher)

    def step(self) -> None:
        """Makes a scene, and sends what has changed to every console."""
        new = self._recent.take_new()
        scene = self._source.scene(self._epoch(), self._recent.counts())
        events = self._events.observe(scene, self._source.moves())
        before, self._scene, self._opening = self._scene, scene, None
        if before is None or not self._watchers:
            return
        change = delta(before, scene)
        if change is None:
            message = self._first()
        else:
            more = replace(change, events=events or msgspec.UNSET, requests=new or msgspec.UNSET)
            message = _event("delta", more)
        for watcher in list(self._watchers):
            if not watcher.is_allowed():
                watcher.end()
                self.close(watcher)
            elif not watcher.send(message):
                self.close(watcher)

    def _first(self) -> bytes:
        assert self._scene is not None, "a step has made it"
        if self._opening is None:
            opening = Opening(
                self._scene, self._events.kept(), self._recent.kept(), **self._describe()
            )
            self._opening = b"retry: %d\n" % RETRY_MS + _event("scene", opening)
        return self._opening

    async def _run(self) -> None:
        while True:
            self._opened.clear()
            self._failures.contain("console", self.step)
            if self._watchers:
                await asyncio.sleep(EVERY_S)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(UNWATCHED_EVERY_S):
                        await self._opened.wait()
                        await asyncio.sleep(EVERY_S)  # the console has just got a scene


def _event(name: str, data: object) -> bytes:
    """A server-sent event. JSON has no line ends."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
