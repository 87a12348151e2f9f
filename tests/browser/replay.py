"""The real page with a generated stream of scenes: a server without a gateway.

The messages have the shapes of `prfaas.console.scene`, as a gateway sends them: a whole scene
first, and then each second what has changed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from prfaas.console.page import asset, live_page
from prfaas.console.scene import (
    ClusterScene,
    EventScene,
    HomeScene,
    LinkScene,
    NodeScene,
    RequestScene,
    Scene,
    TtftParts,
)

GIB = 1 << 30
REASONS = ("long prompt: 31,204 tokens beyond the threshold", "short prompt", "the link is busy")


class Message(NamedTuple):
    event: str  # scene, delta
    data: bytes

    def encode(self) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (self.event.encode(), self.data)


def first_message(
    scene: Scene, events: Sequence[EventScene] = (), requests: Sequence[RequestScene] = ()
) -> Message:
    content = {"scene": scene, "events": events, "requests": requests, "login": False}
    return Message("scene", msgspec.json.encode(content))


class GeneratedTraffic:
    """Scenes of a busy deployment: every node changes each second."""

    def __init__(self, nodes: int, requests_per_s: int, seed: int = 3) -> None:
        self._random = random.Random(seed)
        self._requests_per_s = requests_per_s
        self._request_ids = itertools.count(1)
        self._event_ids = itertools.count(1)
        self._now_s = time.time()
        self._ttft = TtftParts()
        remote, local = nodes // 5, nodes // 2 - nodes // 5
        sizes = {
            "north": remote,
            "south": remote,
            "east": local,
            "west": nodes - 2 * remote - local,
        }
        self._clusters = tuple(
            ClusterScene(
                name,
                "prfaas" if name in ("north", "south") else "pd",
                tuple(self._node(name, number, size) for number in range(size)),
            )
            for name, size in sizes.items()
        )
        self._homes = {home: HomeScene(home) for home in ("east", "west")}

    def _node(self, cluster: str, number: int, size: int) -> NodeScene:
        chosen = self._random
        prefills = cluster in ("north", "south") or number < size // 3
        return NodeScene(
            id=f"http://{cluster}-{number}.example:9000",
            name=f"{cluster}-{number}",
            role="prefill" if prefills else "decode",
            queued=chosen.randrange(4) if prefills else 0,
            active=chosen.randrange(2) if prefills else chosen.randrange(48),
            slots=0 if prefills else 48,
            wait_s=round(chosen.random() * 3, 3) if prefills else 0.0,
            used_bytes=chosen.randrange(40 * GIB),
            evictable_bytes=chosen.randrange(20 * GIB),
            capacity_bytes=80 * GIB,
        )

    def _link(self, source: str, target: str, gbps: float) -> LinkScene:
        chosen = self._random
        share = chosen.random()
        return LinkScene(
            source,
            target,
            verdict="congested" if share > 0.9 else "clear",
            cause="bytes wait for 1.2 s" if share > 0.9 else "",
            capacity_bps=gbps * 1e9,
            rate_bps=share * gbps * 1e9,
            backlog_bytes=int(share * 3e8),
            waited_s=round(share, 3),
            rtt_s=0.02,
            lost_segments=chosen.randrange(20),
        )

    def _home(self, before: HomeScene) -> HomeScene:
        chosen, each = self._random, self._requests_per_s // 2
        remote = chosen.randrange(each // 2 + 1)
        return msgspec.structs.replace(
            before,
            has_plan=True,
            threshold_tokens=19_412.0 * (1 + 0.1 * chosen.random()),
            planned_threshold_tokens=19_412.0,
            planned_rps=float(each),
            planned_share=0.4,
            plan_reason="the traffic has changed",
            waiting=chosen.randrange(9),
            local=before.local + each - remote,
            remote=before.remote + remote,
            prompt_tokens=before.prompt_tokens + 20_000 * each,
            cached_tokens=before.cached_tokens + chosen.randrange(9_000) * each,
            stateless_tokens=before.stateless_tokens + chosen.randrange(900) * each,
        )

    def _request(self) -> RequestScene:
        chosen = self._random
        home = chosen.choice(("east", "west"))
        remote = chosen.random() < 0.4
        source = chosen.choice(("north", "south")) if remote else home
        wait_s, prefill_s, transfer_s = (round(chosen.random(), 3) for _ in range(3))
        return RequestScene(
            id=f"req-{next(self._request_ids):08x}",
            at_s=self._now_s - chosen.random(),
            home=home,
            route="remote" if remote else "local",
            outcome="completed",
            reason=chosen.choice(REASONS),
            prefill=f"{source}-{chosen.randrange(8)}",
            decode=f"{home}-{chosen.randrange(20, 40)}",
            prompt_tokens=chosen.randrange(128, 131_072),
            cached_tokens=chosen.randrange(128),
            output_tokens=chosen.randrange(1024),
            nbytes=chosen.randrange(GIB),
            ttft_s=wait_s + prefill_s + transfer_s,
            wait_s=wait_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            total_s=9.0,
        )

    def _events(self) -> list[EventScene]:
        number = next(self._event_ids)
        if number % 5:
            return []
        text = f"east-{number % 40} becomes a decode node: the traffic has changed"
        return [EventScene(number, self._now_s, "role", text, f"east-{number % 40}")]

    def scene(self) -> Scene:
        """The deployment a second later, or now."""
        sizes = {cluster.name: len(cluster.nodes) for cluster in self._clusters}
        self._clusters = tuple(
            msgspec.structs.replace(
                cluster,
                nodes=tuple(
                    self._node(cluster.name, number, sizes[cluster.name])
                    for number in range(sizes[cluster.name])
                ),
            )
            for cluster in self._clusters
        )
        self._homes = {name: self._home(home) for name, home in self._homes.items()}
        count, seen = self._requests_per_s, self._ttft
        self._ttft = TtftParts(
            seen.first_tokens + count,
            seen.wait_s + 0.4 * count,
            seen.prefill_s + 1.1 * count,
            seen.transfer_s + 0.2 * count,
            seen.decode_s + 0.1 * count,
        )
        links = [("north", "east", 100.0), ("north", "west", 5.0)]
        links += [("south", "east", 5.0), ("south", "west", 3.0)]
        return Scene(
            at_s=self._now_s,
            model="case-study-1t",
            policy="adaptive",
            clusters=self._clusters,
            links=tuple(self._link(*link) for link in links),
            homes=tuple(self._homes.values()),
            ttft=self._ttft,
            in_flight=self._random.randrange(900),
        )

    def messages(self) -> Iterator[Message]:
        """One for each second; the first has the whole scene."""
        yield first_message(self.scene(), [], [self._request() for _ in range(50)])
        while True:
            self._now_s += 1.0
            scene = self.scene()
            delta: dict[str, Any] = {
                "at_s": scene.at_s,
                "nodes": {c.name: {node.id: node for node in c.nodes} for c in scene.clusters},
                "links": scene.links,
                "homes": scene.homes,
                "ttft": scene.ttft,
                "in_flight": scene.in_flight,
                "events": self._events(),
                "requests": [self._request() for _ in range(self._requests_per_s)],
            }
            yield Message("delta", msgspec.json.encode(delta))


class Replay:
    """A server of the page and its assets. Every stream gets the messages, one each `every_s`; the
    stream stays open after the last one."""

    def __init__(self, messages: Sequence[Message], every_s: float = 1.0) -> None:
        self._messages = [message.encode() for message in messages]
        self._every_s = every_s
        self.url = ""

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", self._page)
        app.router.add_get("/console/assets/{name}", self._asset)
        app.router.add_get("/console/stream", self._stream)
        app.router.add_get("/console/requests/{id}", self._request)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        page = live_page("prfaas")
        return web.Response(text=page.html, content_type="text/html", headers=dict(page.headers))

    async def _asset(self, request: web.Request) -> web.Response:
        found = asset(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        return web.Response(body=found.content, content_type=found.content_type)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with suppress(ConnectionError):  # the page was left
            await response.prepare(request)
            for message in self._messages:
                await response.write(message)
                await asyncio.sleep(self._every_s)
            await asyncio.Event().wait()
        return response

    async def _request(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound


@asynccontextmanager
async def replaying(messages: Sequence[Message], every_s: float = 1.0) -> AsyncIterator[Replay]:
    replay = Replay(messages, every_s)
    runner = web.AppRunner(
        replay.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.01
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        replay.url = f"http://{host}:{port}/"
        yield replay
    finally:
        await runner.cleanup()
