"""The official OpenAI client, unchanged, against the gateway's API."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI

from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.api.credentials import TenantKey
from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.request import GatewayRequest
from tests.gateway.api.api_server import MAX_TOKENS, ApiServer, api_server, joined
from tests.node.local_api import BYTES
from tests.waiting import HANG_S

KEYS = [TenantKey("sk-right", "acme")]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
]


def forwarded(request: GatewayRequest) -> Any:
    """The fields as the decode engine reads them."""
    return msgspec.json.decode(joined(encode_body(request.fields)))


def client_of(server: ApiServer, key: str = "sk-right") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


async def test_completions_whole_and_streamed() -> None:
    async with api_server(keys=KEYS) as server:
        async with client_of(server) as client:
            asked = {"model": "made-up", "prompt": "Once upon", "max_tokens": 7, "seed": 5}
            whole = await client.completions.create(**asked)
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage is not None and whole.usage.completion_tokens == 7
            assert whole.usage.prompt_tokens == len("Once upon")
            stream = await client.completions.create(**asked, stream=True)
            chunks = [chunk async for chunk in stream]
            assert all(chunk.choices and chunk.usage is None for chunk in chunks)
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
            ids = await client.completions.create(**{**asked, "prompt": [*b"Once upon"]})
            assert ids.choices[0].text == whole.choices[0].text


async def test_chats_whole_and_streamed() -> None:
    async with api_server(keys=KEYS) as server:
        async with client_of(server) as client:
            asked = {"model": "made-up", "messages": MESSAGES, "max_tokens": 7, "seed": 5}
            whole = await client.chat.completions.create(**asked)
            assert whole.choices[0].message.role == "assistant"
            stream = await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            *chunks, last = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert said == whole.choices[0].message.content
            assert last.choices == [] and last.usage is not None and whole.usage is not None
            assert last.usage.completion_tokens == whole.usage.completion_tokens
            request = server.backend.requests[-1]
            assert len(request.token_ids) == whole.usage.prompt_tokens and request.conversation
            assert forwarded(request)["messages"] == MESSAGES  # unchanged


async def test_models() -> None:
    async with api_server(keys=KEYS) as server:
        async with client_of(server) as client:
            (model,) = [model async for model in client.models.list()]
            assert (await client.models.retrieve(model.id)).id == "made-up"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("another")


async def test_errors_become_the_clients_exceptions() -> None:
    async with api_server(keys=KEYS) as server:
        async with client_of(server) as client:
            good = {"model": "made-up", "prompt": "x", "max_tokens": 1}
            with pytest.raises(openai.NotFoundError) as wrong:
                await client.completions.create(**{**good, "model": "gpt-5"})
            assert wrong.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as long:
                await client.completions.create(**{**good, "prompt": [1] * MAX_TOKENS})
            assert long.value.code == "context_length_exceeded"
            assert long.value.message.count(str(MAX_TOKENS)) >= 2
            with pytest.raises(openai.BadRequestError) as much:
                await client.completions.create(**{**good, "max_tokens": MAX_TOKENS})
            assert much.value.param == "max_tokens"
            with pytest.raises(openai.BadRequestError) as several:
                await client.completions.create(**{**good, "prompt": ["a"] * 257})
            assert several.value.param == "prompt" and "257 prompts" in several.value.message
            with pytest.raises(openai.BadRequestError) as n:
                await client.completions.create(**{**good, "n": 65})
            assert n.value.param == "n"
            with pytest.raises(openai.BadRequestError) as engine:
                await client.completions.create(**{**good, "prompt": [300]})
            assert "263" in engine.value.message  # the engine's message
        async with client_of(server, "sk-wrong") as unauthorised:
            with pytest.raises(openai.AuthenticationError) as key:
                await unauthorised.completions.create(**good)
            assert key.value.code == "invalid_api_key"


async def test_closing_a_stream_ends_its_job() -> None:
    async with api_server(scales=Scales(time=0.01)) as server:
        async with client_of(server) as client:
            stream = await client.completions.create(
                model="made-up", prompt="x", max_tokens=3000, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
            await server.backend.ended.wait()
            await server.backend.node.runner.drain(HANG_S)
            assert "cancelled" in (await server.get("/metrics"))[1].decode()


async def test_cancelling_a_request_before_its_first_token_ends_its_job() -> None:
    async with api_server(scales=Scales(time=1.0)) as server:
        async with client_of(server) as client:
            asking = asyncio.create_task(
                client.completions.create(model="made-up", prompt="x" * 100, max_tokens=3000)
            )
            await server.backend.arrived.wait()
            asking.cancel()
            await server.backend.ended.wait()
            await server.backend.node.runner.drain(HANG_S)


async def test_text_requires_a_tokenizer_and_token_ids_do_not() -> None:
    async with api_server(tokenizer=None) as server:
        async with client_of(server) as client:
            with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                await client.completions.create(model="made-up", prompt="x")
            with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                await client.chat.completions.create(model="made-up", messages=MESSAGES)
            answer = await client.completions.create(model="made-up", prompt=[1, 2], max_tokens=2)
            assert answer.choices[0].text is not None


async def test_tools_and_unknown_fields_reach_the_engine() -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}

    async with api_server() as server:
        async with client_of(server) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="made-up",
                    messages=MESSAGES,
                    tools=[tool],
                    tool_choice="auto",
                    max_tokens=1,
                    extra_body={"unknown_field": {"deep": [1]}, "cache_salt": "mine"},
                )
            assert refused.value.param == "unknown_field"
            request = server.backend.requests[-1]
            fields = forwarded(request)
            assert fields["tools"] == [tool] and fields["tool_choice"] == "auto"
            assert fields["unknown_field"] == {"deep": [1]}
            assert "cache_salt" not in request.fields and request.salt not in ("", "mine")
            assert BYTES.decode(request.token_ids.array.tolist()).count("Why?") == 1
