"""Hostile requests to every route of every service: each is served or refused with a status that
the service's document has, and none fails. Routes are found where they are added; what is sent is
made from the document, and changed."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from aiohttp.web_urldispatcher import Resource
from yarl import URL

from prfaas.engine.emulated.pace import Scales
from prfaas_lab.testing.hostile import INTEGERS, STRINGS, as_json, mutate_json, of_schema
from tests.engine.emulated.builders import emulated
from tests.gateway.api.api_server import api_server
from tests.gateway.console.made_scenes import MadeScenes
from tests.kvd import hosts
from tests.node.local_api import BYTES, local_api
from tests.waiting import HANG_S

WITH_BODY, WITHOUT_BODY = 80, 8  # requests to each route
NO_TIME = Scales(time=1e-6)
TEXTS = tuple(text or "x" for text in (*STRINGS, *map(str, INTEGERS)) if len(text) < 300)
# Of a time to wait for: nothing that a service may wait for.
SECONDS = ("", "nan", "inf", "-1", "x", "1_0", "0x10", "1e999", "0", "0.001")
# Of routes that are no part of the published API: the console's.
# Routes whose refusals tell more than an error does.
OTHERWISE = ("/ready", "/v1/role")
UNPUBLISHED = {"prompt": "x", "max_tokens": 1, "tenant": ""}


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[str]:
    """Open to registrations, with a console."""
    async with api_server(any_member=True, scenes=MadeScenes(), scales=NO_TIME) as server:
        yield server.url


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[str]:
    async with local_api(emulated(scales=NO_TIME, vocab_size=264, max_tokens=1024), BYTES) as found:
        yield str(found.http.make_url("/")).rstrip("/")


@asynccontextmanager
async def kvd(folder: Path) -> AsyncIterator[str]:
    with hosts.kvd(folder, node="pool") as host, closing(host.engine()):
        yield host.url


SERVICES: dict[str, Callable[[Path], AbstractAsyncContextManager[str]]] = {
    "gateway": gateway,
    "node": node,
    "kvd": kvd,
}


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Method and path of every route that is added from now on."""
    found: set[tuple[str, str]] = set()
    add_route = Resource.add_route

    def added(resource: Resource, method: str, *handler: Any, **more: Any) -> Any:
        found.add((method.lower(), resource.canonical))
        return add_route(resource, method, *handler, **more)

    monkeypatch.setattr(Resource, "add_route", added)
    return found


class Hostile:
    """Requests to one service."""

    def __init__(self, document: dict[str, Any], draw: random.Random) -> None:
        self._document = document
        self._draw = draw

    def operation(self, method: str, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._document["paths"].get(path, {}).get(method, {})
        return found

    def target(self, path: str, operation: dict[str, Any]) -> str:
        draw = self._draw
        for name in re.findall(r"{\w+}", path):
            path = path.replace(name, quote(draw.choice(TEXTS), safe=""))
        query = []
        for one in operation.get("parameters", ()):
            if one["in"] == "query" and draw.random() < 0.7:
                texts = SECONDS if one["schema"].get("type") == "number" else TEXTS
                query.append(f"{one['name']}={quote(draw.choice(texts), safe='')}")
        return f"{path}?{'&'.join(query)}"

    def body(self, path: str, operation: dict[str, Any]) -> bytes:
        value: Any = UNPUBLISHED
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            value = of_schema(schema, self._document, self._draw)
        if path.endswith("completions"):  # short answers: their length is not tested here
            value = {**value, "model": "made-up", "max_tokens": 2}
        return as_json(value) if self._draw.random() < 0.2 else mutate_json(value, self._draw)


def is_problem(data: bytes) -> bool:
    """An error in the form of OpenAI's API, or of a kvd's."""
    found = msgspec.json.decode(data)
    problem = found.get("error", found)
    return bool(problem["code"] and problem["message"])


@pytest.mark.parametrize("service", SERVICES)
async def test_every_route_serves_or_refuses_hostile_requests(
    service: str, routes: set[tuple[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[tuple[str, str], Counter[int]] = {}
    async with (
        asyncio.timeout(HANG_S),
        SERVICES[service](tmp_path) as url,
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{url}/openapi.json") as answer:
            document = await answer.json()
        hostile = Hostile(document, random.Random(service))
        for method, path in sorted(routes):
            operation = hostile.operation(method, path)
            counts = seen[method, path] = Counter()
            for _ in range(WITH_BODY if method == "post" else WITHOUT_BODY):
                target = hostile.target(path, operation)
                body = hostile.body(path, operation) if method == "post" else None
                async with http.request(
                    method,
                    URL(f"{url}{target}", encoded=True),
                    data=body,
                    headers={"Content-Type": "application/json", "Origin": url},
                    allow_redirects=False,
                ) as answer:
                    counts[answer.status] += 1
                    if path.endswith("/stream"):
                        continue
                    data = await answer.read()
                told = (method, target, body, answer.status, data)
                documented = set(map(int, operation.get("responses", ())))
                assert answer.status in documented or not documented, told
                assert answer.status not in (500, 501), told
                if answer.status >= 400 and method != "head" and path not in OTHERWISE:
                    assert is_problem(data), told
                    # An engine that does not match gets all the differences.
                    assert len(data) < 5_000 or answer.status == 409, told
        for path in (path for path in document["paths"] if "{" not in path):
            async with http.patch(f"{url}{path}") as answer:
                assert answer.status == 405 and answer.headers["Allow"], path
                assert is_problem(await answer.read())
        async with http.get(f"{url}/nowhere") as answer:
            assert answer.status == 404 and is_problem(await answer.read())
    published = {(m, path) for path, methods in document["paths"].items() for m in methods}
    assert published <= seen.keys()
    for method, path in published:
        if method == "post":  # a kvd without a key has nothing to prove
            assert seen[method, path].keys() & {400, 409}, f"{path} has refused no body"
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not failures, failures[0].getMessage()
