"""The console over real hosts: an offloaded request, with its split and its explanation."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import msgspec
import pytest

from prfaas.clock import MonotonicClock
from prfaas.console.scene import RequestScene
from prfaas.gateway import process
from prfaas.gateway.process import GatewayOptions
from tests.gateway.backends import FAR, HOME, MODEL, THRESHOLD, prompt, serving
from tests.gateway.conftest import Hosts
from tests.gateway.console.test_feed import parsed
from tests.waiting import HANG_S


async def test_an_offloaded_request_is_shown_with_its_explanation(unassigned: Hosts) -> None:
    made = unassigned.deployment()
    async with (
        asyncio.timeout(HANG_S),
        serving(made) as backend,
        aiohttp.ClientSession() as http,
    ):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            options, clock = GatewayOptions(), MonotonicClock()
            async with process.serving(
                made, backend, options, clock, listening, scenes=backend.scenes
            ) as url:
                stream = await http.get(f"{url}/console/stream")
                name, opening = parsed(await stream.content.readuntil(b"\n\n"))
                assert name == "scene"
                assert [(c.name, len(c.nodes)) for c in opening.scene.clusters] == [
                    (HOME, 3),
                    (FAR, 1),
                ]
                nodes = [node for cluster in opening.scene.clusters for node in cluster.nodes]
                assert {node.status for node in nodes} == {"in use"}
                assert [(k.source, k.target) for k in opening.scene.links] == [(FAR, HOME)]
                body = {
                    **{"model": MODEL, "prompt": prompt(4 * THRESHOLD, "console")},
                    **{"max_tokens": 4, "stream": True},
                }
                headers = {"X-Request-Id": "shown-1"}
                async with http.post(f"{url}/v1/completions", json=body, headers=headers) as got:
                    assert got.status == 200 and b"[DONE]" in await got.read()
                shown: RequestScene | None = None
                homes = ()
                while shown is None or not homes:
                    change = parsed(await stream.content.readuntil(b"\n\n"))[1]
                    if change.requests is not msgspec.UNSET:
                        ended = [r for r in change.requests if r.outcome == "completed"]
                        shown = shown or next((r for r in ended if r.id == "shown-1"), None)
                    if change.homes is not msgspec.UNSET:
                        homes = tuple(home for home in change.homes if home.remote == 1)
                assert (shown.home, shown.route, shown.prefill) == (HOME, "remote", "far0")
                assert shown.prompt_tokens == 4 * THRESHOLD and shown.output_tokens == 4
                parts = (shown.wait_s, shown.prefill_s, shown.transfer_s, shown.decode_s)
                assert shown.ttft_s == pytest.approx(sum(parts), abs=0.001)
                assert shown.prefill_s > 0 and shown.decode_s > 0
                async with http.get(f"{url}/console/requests/shown-1") as got:
                    found = await got.json()
                assert found["failures"] == []
                assert found["explanation"]["chosen"]["prefill"] == "far0"
                assert {o["cluster"] for o in found["explanation"]["alternatives"]} == {HOME, FAR}
                stream.close()
