"""The console's paths over sockets: nothing without a session, and nothing for other sites."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import aiohttp
import msgspec
import pytest

from prfaas.console import page
from prfaas.gateway.api.credentials import TenantKey
from prfaas.gateway.console import feed as feed_module
from prfaas.gateway.console.feed import MOST_WATCHERS, Watcher
from prfaas.gateway.console.paths import FORM_BYTES, PROMPT_BYTES, parse_key
from prfaas.gateway.console.sessions import MOST_FAILURES
from prfaas.security.shared_key import SharedKey
from tests.gateway.api.api_server import ApiServer, api_server
from tests.gateway.backends import until
from tests.gateway.console.made_scenes import HOSTILE, PARTS, MadeScenes, node, scene
from tests.gateway.console.test_events import with_node
from tests.gateway.console.test_feed import parsed

KEY = "k" * 32
TENANTS = (TenantKey("a" * 32, "acme"), TenantKey("b" * 32, "big"))
GETS = ("/console/stream", "/console/requests/x", "/console/assets/live.js", "/console/x")
POSTS = ("/console/complete", "/console/explain", "/console/logout")
LOCALS = ("127.0.0.1:1", "localhost", "[::1]:80")


@pytest.fixture(autouse=True)
def tiny_assets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "page_parts", lambda: PARTS)


@dataclass
class Console:
    """A browser that may have a cookie."""

    server: ApiServer
    source: MadeScenes
    browser: aiohttp.ClientSession

    async def send(
        self, method: str, path: str, *, origin: bool = True, **more: Any
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"Origin": self.server.url} if origin else {}
        headers |= more.pop("headers", {})
        async with self.browser.request(
            method, f"{self.server.url}{path}", headers=headers, allow_redirects=False, **more
        ) as answer:
            return answer.status, answer.headers, await answer.read()

    async def log_in(self, key: str = KEY) -> str:
        """Where the browser is sent to."""
        status, headers, _ = await self.send("POST", "/console/login", data={"key": key})
        assert status == 303
        return headers["Location"]

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self.browser.get(f"{self.server.url}/console/stream") as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            yield answer


async def event(answer: aiohttp.ClientResponse) -> tuple[str, Any]:
    return parsed(await answer.content.readuntil(b"\n\n"))


@asynccontextmanager
async def console(*, locked: bool = True, **more: Any) -> AsyncIterator[Console]:
    """`locked`: there are an operator key and tenant keys."""
    source = MadeScenes()
    keys: dict[str, Any] = {"keys": TENANTS, "operator": SharedKey([KEY])} if locked else {}
    jar = aiohttp.CookieJar(unsafe=True)  # also for addresses
    async with (
        api_server(scenes=source, **keys, **more) as server,
        aiohttp.ClientSession(cookie_jar=jar) as browser,
    ):
        yield Console(server, source, browser)


def error(body: bytes) -> str:
    code: str = msgspec.json.decode(body)["error"]["code"]
    return code


async def test_without_a_session_there_is_nothing_to_see() -> None:
    async with console() as made:
        status, headers, body = await made.send("GET", "/")
        assert status == 200 and b'id="login"' in body and b"made-up" not in body
        assert "script-src 'none'" in headers["Content-Security-Policy"]
        assert (await made.send("GET", "/console/assets/console.css"))[0] == 200
        for path in GETS:
            status, headers, body = await made.send("GET", path)
            assert (status, error(body)) == (401, "unauthorized")
        for path in POSTS:
            status, _, body = await made.send("POST", path, json={"prompt": "a"})
            assert (status, error(body)) == (401, "unauthorized")
        assert made.source.made <= 1, "no scene was made for these"
        for cookie in ("x", "x" * 200, KEY):
            sent = {"Cookie": f"prfaas_console_{made.server.address[1]}={cookie}"}
            assert (await made.send("GET", "/console/stream", headers=sent))[0] == 401
        sent = {"Authorization": f"Bearer {TENANTS[0].secret}"}
        assert (await made.send("GET", "/console/stream", headers=sent))[0] == 401


async def test_a_login_gives_a_session_and_a_logout_ends_it() -> None:
    async with console() as made:
        assert await made.log_in("wrong") == "../?problem=key"
        status, _, body = await made.send("GET", "/?problem=key")
        assert status == 200 and b'role="alert"' in body and b"not the operator key" in body
        assert b"alert" not in (await made.send("GET", "/?problem=<b>"))[2]
        status, headers, _ = await made.send("POST", "/console/login", data={"key": f" {KEY} "})
        assert status == 303 and headers["Location"] == "../"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie
        assert "Max-Age=43200" in cookie and "Secure" not in cookie and KEY not in cookie
        status, headers, body = await made.send("GET", "/")
        assert b"importmap" in body and "no-store" in headers["Cache-Control"]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self' 'sha256-" in policy
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        async with made.stream() as stream:
            name, opening = await event(stream)
            assert name == "scene" and opening.login and opening.tenants == ["acme", "big"]
            assert (await made.send("POST", "/console/logout"))[0] == 303
            await stream.content.read()  # the stream ends with the session
        assert (await made.send("GET", "/console/stream"))[0] == 401
        assert b'id="login"' in (await made.send("GET", "/"))[2]


async def test_the_session_opens_no_other_path() -> None:
    async with console() as made:
        await made.log_in()
        for path in ("/prfaas/v1/state", "/metrics", "/v1/models"):
            assert (await made.send("GET", path))[0] == 401


async def test_failed_logins_are_limited() -> None:
    async with console() as made:
        for _ in range(MOST_FAILURES):
            assert await made.log_in("wrong") == "../?problem=key"
        assert await made.log_in("wrong") == "../?problem=often"
        assert await made.log_in() == "../"  # the right key is never locked out


async def test_bodies_are_short() -> None:
    async with console() as made:
        status, _, body = await made.send(
            "POST", "/console/login", data=b"key=" + b"x" * FORM_BYTES
        )
        assert (status, error(body)) == (413, "body_too_large")

        async def unending() -> AsyncIterator[bytes]:
            yield b"key="

        status, _, body = await made.send("POST", "/console/login", data=unending())
        assert (status, error(body)) == (411, "length_required")
        await made.log_in()
        long = msgspec.json.encode({"prompt": "x" * PROMPT_BYTES})
        for path in POSTS[:2]:
            assert (await made.send("POST", path, data=long))[0] == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 303),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[evil"}, 403),
        ({}, 403),
    ],
)
async def test_other_sites_cannot_post(headers: dict[str, str], status: int) -> None:
    async with console() as made:
        sent = {"data": {"key": KEY}, "origin": False, "headers": headers}
        assert (await made.send("POST", "/console/login", **sent))[0] == status


async def test_other_sites_cannot_read() -> None:
    async with console() as made:
        await made.log_in()
        for site in ("cross-site", "same-site"):
            sent: dict[str, Any] = {"origin": False, "headers": {"Sec-Fetch-Site": site}}
            assert (await made.send("GET", "/console/stream", **sent))[0] == 403
            assert (await made.send("GET", "/console/requests/x", **sent))[0] == 403
            assert (await made.send("GET", "/", **sent))[0] == 200, "a link to the console"


async def test_without_keys_there_is_no_login_but_only_under_an_address() -> None:
    async with console(locked=False) as made:
        assert b"importmap" in (await made.send("GET", "/"))[2]
        async with made.stream() as stream:
            opening = (await event(stream))[1]
            assert not opening.login and opening.tenants == []
        for host in LOCALS:
            assert (await made.send("GET", "/", headers={"Host": host}))[0] == 200
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[x"):
            status, _, body = await made.send("GET", "/", headers={"Host": host})
            assert (status, error(body)) == (403, "unknown_host")


async def test_tenant_keys_without_an_operator_key_close_the_console() -> None:
    async with api_server(scenes=MadeScenes(), keys=TENANTS) as server:
        for path in ("/", *GETS):
            status, body = await server.get(path)
            assert (status, error(body)) == (403, "operator_key_required")


async def test_without_a_console_there_are_no_paths() -> None:
    async with api_server() as server:
        for path in ("/", *GETS):
            assert (await server.get(path))[0] == 404


async def test_a_stream_has_the_scene_and_then_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "EVERY_S", 0.01)
    async with console(locked=False) as made:
        async with made.stream() as stream:
            assert (await event(stream))[0] == "scene"
            made.source.now = with_node(scene(), node(2, status="lost", why=HOSTILE))
            while True:
                name, change = await event(stream)
                assert name == "delta"
                if change.nodes is not msgspec.UNSET:
                    break
            assert change.nodes["far"]["http://n2:2"].why == HOSTILE
            assert change.events[0].text == f"n2 of far is lost: {HOSTILE}."
        head = await made.send("HEAD", "/console/stream")
        assert head[0] == 200 and head[2] == b""


async def test_too_many_streams_are_refused() -> None:
    async with console(locked=False) as made:
        open_ones = [
            await made.browser.get(f"{made.server.url}/console/stream")
            for _ in range(MOST_WATCHERS)
        ]
        status, headers, body = await made.send("GET", "/console/stream")
        assert (status, error(body)) == (503, "too_many_consoles") and "Retry-After" in headers
        for answer in open_ones:
            answer.close()
        async with asyncio.timeout(30):
            while True:
                answer = await made.browser.get(f"{made.server.url}/console/stream")
                answer.close()
                if answer.status == 200:
                    break


async def test_a_browser_that_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "EVERY_S", 0.001)
    aborted = asyncio.Event()
    monkeypatch.setattr(feed_module, "Watcher", partial(Aborting, aborted))
    async with console(locked=False) as made:
        # Every message is long, so that the buffers of the sockets are soon full.
        long = [tuple(node(n, why=text * 300) for n in range(2, 1000)) for text in "xy"]
        made.source.now = with_node(scene(), *long[0])
        with socket.create_connection(made.server.address) as reader:
            reader.setblocking(False)
            loop = asyncio.get_running_loop()
            asked = b"GET /console/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            await loop.sock_sendall(reader, asked)
            async with made.stream() as stream:
                turns = cycle(long)
                while not aborted.is_set():
                    made.source.now = with_node(scene(), *next(turns))
                    await event_of_any_length(stream)
                # What the sockets' buffers held, and then the end.
                with suppress(ConnectionError):
                    while await loop.sock_recv(reader, 1 << 20):
                        pass
                await event_of_any_length(stream)  # the other console goes on


class Aborting(Watcher):
    """Says when its connection is closed because it does not read."""

    def __init__(self, aborted: asyncio.Event, *given: Any) -> None:
        super().__init__(*given)
        self.aborted = aborted

    def send(self, message: bytes) -> bool:
        sent = super().send(message)
        if not sent:
            self.aborted.set()
        return sent


async def event_of_any_length(answer: aiohttp.ClientResponse) -> None:
    seen = b""
    while not seen.endswith(b"\n\n"):
        seen = (seen + await answer.content.readany())[-2:]


async def test_the_prompt_box_streams_an_answer_and_its_request_is_found() -> None:
    async with console() as made:
        await made.log_in()
        sent = {"prompt": "Hello", "max_tokens": 3, "tenant": "acme"}
        status, headers, body = await made.send("POST", "/console/complete", json=sent)
        assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
        assert body.endswith(b"data: [DONE]\n\n") and b'"usage"' in body
        (asked,) = made.server.backend.requests
        assert asked.tenant == "acme" and asked.salt and asked.stream
        (trace,) = made.server.backend.traces
        assert trace.explains
        name = headers["X-Request-Id"]
        await until(lambda: made.server.backend.ended.is_set())
        status, _, body = await made.send("GET", f"/console/requests/{name}")
        found = msgspec.json.decode(body)
        assert found["request"]["id"] == name and found["request"]["reason"] == "the only node"
        assert found["request"]["output_tokens"] == 3 or found["request"]["outcome"] != "completed"
        assert found["explanation"] is None and found["failures"] == []
        for unknown in ("nothing", "%3Cb%3E", "x" * 200):
            assert (await made.send("GET", f"/console/requests/{unknown}"))[0] == 404


async def test_the_prompt_box_explains() -> None:
    async with console() as made:
        await made.log_in()
        sent = {"prompt": [1, 2, 3], "tenant": "big"}
        status, _, body = await made.send("POST", "/console/explain", json=sent)
        found = msgspec.json.decode(body)
        assert status == 200 and found["prompt_tokens"] == 3 and found["salt"]


@pytest.mark.parametrize(
    "form",
    [
        {"prompt": "a", "tenant": "unknown"},
        {"prompt": "a"},
        {"prompt": "a", "tenant": "acme", "max_tokens": 0},
        {"prompt": "a", "tenant": "acme", "max_tokens": 10**6},
        {"prompt": "a", "tenant": "acme", "kv_transfer_params": {}},
        {"prompt": ["a", "b"], "tenant": "acme"},
        {"prompt": {"a": 1}, "tenant": "acme"},
        [],
    ],
)
async def test_wrong_prompts_are_refused(form: object) -> None:
    async with console() as made:
        await made.log_in()
        for path in POSTS[:2]:
            status, _, body = await made.send("POST", path, json=form)
            assert (status, error(body)) == (400, "invalid_request")
        assert made.server.backend.requests == []


async def test_prompts_of_the_console_are_within_the_limits_of_their_tenant() -> None:
    async with console(tenants={"acme": {"max_in_flight": 1}}) as made:
        await made.log_in()
        held = asyncio.Event()
        made.server.backend.before_answer = held.wait
        sent = {"prompt": "Hello", "max_tokens": 3, "tenant": "acme"}
        first = asyncio.create_task(made.send("POST", "/console/complete", json=sent))
        await made.server.backend.arrived.wait()
        status, _, body = await made.send("POST", "/console/complete", json=sent)
        assert (status, error(body)) == (429, "tenant_limit")
        held.set()
        assert (await first)[0] == 200


async def test_a_request_of_a_client_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "EVERY_S", 0.01)
    async with console(locked=False) as made:
        async with made.stream() as stream:
            await event(stream)
            body = {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True}
            await made.send(
                "POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine-1"}
            )
            outcomes = set()
            while "completed" not in outcomes:
                change = (await event(stream))[1]
                if change.requests is not msgspec.UNSET:
                    outcomes |= {r.outcome for r in change.requests if r.id == "mine-1"}
            assert outcomes <= {"in progress", "completed"}


async def test_assets_are_kept_by_the_hash_of_their_content() -> None:
    async with console(locked=False) as made:
        for name, found in PARTS.assets.items():
            path = f"/console/assets/{name}"
            status, headers, body = await made.send("GET", f"{path}?v={found.version}")
            assert (status, body) == (200, found.content)
            assert headers["Content-Type"] == f"{found.content_type}; charset=utf-8"
            assert "immutable" in headers["Cache-Control"]
            assert "no-store" in (await made.send("GET", path))[1]["Cache-Control"]
        for path in ("page.html", "..%2fscene.py", "%00"):
            assert (await made.send("GET", f"/console/assets/{path}"))[0] == 404


async def test_open_streams_do_not_delay_the_end_of_the_gateway() -> None:
    async with console(locked=False, timeouts={"drain_s": 3600.0}) as made:
        stream = await made.browser.get(f"{made.server.url}/console/stream")
        assert (await event(stream))[0] == "scene"
    # The server has ended, although the stream was open.
    stream.close()


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b"key=abc", "abc"),
        (b"key=a%2Bb+", "a+b"),
        (b"other=1&key=abc&key=def", "abc"),
        (b"", ""),
        (b"\xff\xfe", ""),
        (b"&".join(b"k=1" for _ in range(100)), ""),
    ],
)
def test_forms(data: bytes, key: str) -> None:
    assert parse_key(data) == key
