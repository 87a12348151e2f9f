"""A `prfaas gateway` process with two tenants over emulated nodes, while one of them floods it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.backends import MODEL, prompt
from tests.gateway.conftest import Hosts
from tests.gateway.processes import gateway_process
from tests.secret_files import write_secret
from tests.waiting import HANG_S

FLOOD = 200
OTHERS = 5
OPERATOR = "the-operator-key-of-the-test"
LONG_TOKENS = 4_096


@pytest.mark.slow
async def test_a_flood_of_one_tenant_is_overtaken_by_another(
    unassigned: Hosts, tmp_path: Path
) -> None:
    async with two_tenants(unassigned, tmp_path) as (http, url):
        served = await flood_and_others(http, url)
        tenants = (await state(http, url))["tenants"]
        page = await metrics(http, url)
    last = max(place for place, tenant in enumerate(served) if tenant == "b")
    # Much of the flood still waited when the last request of the other tenant was served.
    assert served[last:].count("a") > FLOOD / 4
    assert (served.count("a"), served.count("b")) == (FLOOD, OTHERS)
    idle = {"weight": 1.0, "in_flight": 0, "queued": 0, "queued_tokens": 0, "body_bytes": 0}
    assert tenants == {"a": {**idle, "refused": 0}, "b": {**idle, "weight": 2.0, "refused": 0}}
    assert 'prfaas_gateway_tenant_weight{tenant="b"} 2.0' in page
    assert 'prfaas_gateway_tenant_refused_requests_total{tenant="a"} 0.0' in page
    for tenant, count in ("a", FLOOD), ("b", OTHERS):
        labels = f'outcome="completed",tenant="{tenant}"'
        assert f"prfaas_gateway_tenant_requests_total{{{labels}}} {count}.0" in page


@pytest.mark.slow
async def test_many_choices_of_one_tenant_leave_slots_to_another(
    unassigned: Hosts, tmp_path: Path
) -> None:
    """Each request of the flood has three times as many choices as a decode node has slots, and is
    at a node of its own. In the order of arrival, the other tenant's request would have a slot when
    all choices of one of them have ended."""

    def asked(tenant: str, seed: int, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt(100, seed), "temperature": 1.0, **fields}
        return {"json": body, "headers": {"Authorization": f"Bearer key-{tenant}"}}

    many = {"n": 60, "max_tokens": 100_000, "stream": True}
    async with two_tenants(unassigned, tmp_path) as (http, url):
        path = f"{url}/v1/completions"
        async with (
            http.post(path, **asked("a", 1, **many)) as first,
            http.post(path, **asked("a", 2, **many)) as second,
        ):
            assert (first.status, second.status) == (200, 200)
            async with http.post(path, **asked("b", 3, max_tokens=20)) as answer:
                found = await answer.json()
            assert answer.status == 200, found
            assert found["usage"]["completion_tokens"] == 20
            for flood in first, second:
                seen = flood.content.read_nowait()
                assert seen and b"[DONE]" not in seen, "it is still answered"
            tenants = (await state(http, url))["tenants"]
            assert (tenants["a"]["in_flight"], tenants["b"]["in_flight"]) == (120, 0)
    await asyncio.to_thread(unassigned.wait_until_idle)


@asynccontextmanager
async def two_tenants(
    hosts: Hosts, folder: Path
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A gateway process, whose nodes are all in use, and its URL."""
    write_secret(folder / "operator.key", f"{OPERATOR}\n")
    with gateway_process(
        folder,
        hosts.deployment(),
        "--advise",
        key=OPERATOR,
        operator_key_file="operator.key",
        keys=[{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}],
        tenants={"b": {"weight": 2.0}},
        timeouts={"queue_s": HANG_S},
    ) as gateway:
        gateway.wait_until_all_in_use()
        connections = aiohttp.TCPConnector(limit=0)
        async with asyncio.timeout(HANG_S), aiohttp.ClientSession(connector=connections) as http:
            yield http, gateway.url
        gateway.stop()


async def flood_and_others(http: aiohttp.ClientSession, url: str) -> list[str]:
    """The tenants in the order in which their requests were served. The other tenant asks when all
    requests of the flood are in flight."""
    served: list[str] = []

    async def ask(tenant: str, seed: int) -> None:
        body = {"model": MODEL, "prompt": prompt(LONG_TOKENS, seed), "max_tokens": 1}
        headers = {"Authorization": f"Bearer key-{tenant}"}
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        served.append(tenant)

    async with asyncio.TaskGroup() as tasks:
        for seed in range(FLOOD):
            tasks.create_task(ask("a", seed))
        while True:
            requests = (await state(http, url))["requests"]
            if requests["in_flight"] + len(served) >= FLOOD:
                break
        for seed in range(OTHERS):
            tasks.create_task(ask("b", FLOOD + seed))
    return served


async def metrics(http: aiohttp.ClientSession, url: str) -> str:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    async with http.get(f"{url}/metrics", headers=headers) as answer:
        return await answer.text()


async def state(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    async with http.get(f"{url}/prfaas/v1/state", headers=headers) as answer:
        found: dict[str, Any] = await answer.json()
        return found
