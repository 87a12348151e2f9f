"""Lists of prompts over real nodes: each prompt takes its own route."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from prfaas.clock import MonotonicClock
from prfaas.gateway.process import GatewayOptions
from prfaas.gateway.process import serving as serving_http
from tests.gateway.backends import THRESHOLD, prompt, serving
from tests.gateway.conftest import Hosts


@asynccontextmanager
async def gateway(hosts: Hosts) -> AsyncIterator[str]:
    made = hosts.deployment()
    async with serving(made) as backend:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with serving_http(
                made, backend, GatewayOptions(), MonotonicClock(), listening
            ) as url:
                yield url


async def complete(http: aiohttp.ClientSession, url: str, prompts: list[Any], **more: Any) -> Any:
    fields = {"prompt": prompts, "max_tokens": 3, "temperature": 0.0, "return_token_ids": True}
    async with http.post(f"{url}/v1/completions", json={**fields, **more}) as answer:
        assert answer.status == 200, await answer.text()
        if answer.content_type == "application/json":
            return await answer.json()
        *events, done, nothing = (await answer.text()).split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_long_prompt_of_a_list_is_offloaded_and_a_short_one_is_not(
    emulated: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [prompt(50, "list"), prompt(2 * THRESHOLD, "list")]
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with gateway(emulated) as url, aiohttp.ClientSession() as http:
            body = await complete(http, url, prompts)
            single = [await complete(http, url, ids) for ids in prompts]
    expected = [one["choices"][0]["token_ids"] for one in single]
    assert [choice["token_ids"] for choice in body["choices"]] == expected
    line = json.loads(caplog.records[0].getMessage())
    assert (line["route"], line["outcome"]) == ("mixed", "completed")
    short, long = line["prompts"]
    assert (short["route"], long["route"]) == ("local", "remote")
    assert long["prefill"] == "far0" and long["form"]
    assert line["bytes"] == short["bytes"] + long["bytes"]
    assert line["prompt_tokens"] == sum(map(len, prompts)) and line["output_tokens"] == 6


async def test_the_choices_of_an_offloaded_prompt_share_one_transfer(
    emulated: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [prompt(50, "n"), prompt(2 * THRESHOLD, "n")]
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 3}
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with gateway(emulated) as url, aiohttp.ClientSession() as http:
            whole = await complete(http, url, prompts, **sampled)
            streamed = await complete(http, url, prompts, **sampled, stream=True)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert whole["usage"]["completion_tokens"] == 6 * 3
    found: dict[int, list[int]] = {}
    for piece in streamed:
        for choice in piece["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"] or ())
    assert found == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    first = json.loads(caplog.records[0].getMessage())
    assert [one["route"] for one in first["prompts"]] == ["local", "remote"]
    assert [one["attempts"] for one in first["prompts"]] == [1, 1]
    emulated.wait_until_idle()  # no page of the transfer is kept for an attachment
