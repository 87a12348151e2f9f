from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from prfaas.engine.api import MAX_CUTS
from prfaas.engine.emulated.pace import Scales
from prfaas.text import ModelTokenizer
from prfaas.types import Grant, TransferId
from tests.engine.emulated.builders import emulated
from tests.node.local_api import BYTES, LocalApi, local_api, pieces
from tests.waiting import HANG_S

FAST = Scales(time=1e-3)
GRANT = msgspec.to_builtins(Grant(TransferId("t-1"), "s", "127.0.0.1:1", {}, 1000, 5.0))
PROMPT = [7] * 100


@asynccontextmanager
async def node_server(
    tokenizer: ModelTokenizer | None = BYTES, **options: Any
) -> AsyncIterator[LocalApi]:
    engine = emulated(**{"scales": FAST, **options})
    async with asyncio.timeout(HANG_S), local_api(engine, tokenizer) as node:
        yield node


async def test_an_answer_has_openais_shape() -> None:
    async with node_server() as node:
        status, answer = await node.complete(
            prompt=PROMPT, max_tokens=5, return_token_ids=True, model="made-up", ignore_eos=True
        )
        assert status == 200 and answer["object"] == "text_completion"
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 5
        assert choice["text"] == BYTES.decode(choice["token_ids"])
        assert answer["usage"] == {
            "prompt_tokens": 100,
            "completion_tokens": 5,
            "total_tokens": 105,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert answer["kv_transfer_params"] is None


async def test_pieces_make_up_the_whole() -> None:
    async with node_server() as node:
        asked = {"prompt": "some text", "max_tokens": 20, "return_token_ids": True, "seed": 3}
        _, whole = await node.complete(**asked)
        events = await node.stream(**asked, stream_options={"include_usage": True})
        *pieces, usage = events
        choices = [piece["choices"][0] for piece in pieces]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert ids == whole["choices"][0]["token_ids"]
        assert [choice["finish_reason"] for choice in choices] == [None] * 20 + ["length"]
        assert usage["choices"] == [] and usage["usage"] == whole["usage"]


async def test_continuous_usage_is_in_every_piece() -> None:
    async with node_server() as node:
        asked = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, "seed": 3}
        options = {"include_usage": True, "continuous_usage_stats": True}
        *pieces, last = await node.stream(**asked, stream_options=options)
        shown = [piece["usage"] for piece in pieces]
        assert [usage["completion_tokens"] for usage in shown] == [1, 2, 3, 4, 5, 5]
        assert {usage["prompt_tokens"] for usage in shown} == {len(PROMPT)}
        assert last["usage"]["completion_tokens"] == 5
        # As in vLLM, it says nothing without include_usage.
        only = await node.stream(**asked, stream_options={"continuous_usage_stats": True})
        assert not any("usage" in piece for piece in only)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_the_job(stream: bool) -> None:
    async with node_server() as node:
        asked = {"prompt": PROMPT, "max_tokens": 3000, "seed": 1, "temperature": 1.0}
        _, plain = await node.complete(**{**asked, "max_tokens": 60})
        text = plain["choices"][0]["text"]
        stop = text[10:13]
        if stream:
            pieces = await node.stream(**asked, stop=stop)
            seen = "".join(piece["choices"][0]["text"] for piece in pieces)
            last = pieces[-1]["choices"][0]
        else:
            _, answer = await node.complete(**asked, stop=stop)
            (last,) = answer["choices"]
            seen = last["text"]
        assert seen == text[: text.index(stop)]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        await node.runner.drain(HANG_S)  # the job ends without having generated 3,000 tokens


async def test_a_client_that_goes_away_ends_its_job() -> None:
    async with node_server(scales=Scales(time=1.0)) as node:
        asking = asyncio.create_task(node.complete(prompt=PROMPT, max_tokens=3000))
        while not await metrics(node, running=1):
            pass
        asking.cancel()
        await asyncio.wait([asking])
        while 'finished_reason="abort"' not in await metrics(node):
            pass
        status, _ = await node.complete(prompt=PROMPT, max_tokens=1)
        assert status == 200


async def metrics(node: LocalApi, running: int | None = None) -> str:
    """The page, or nothing while another number of requests is running."""
    async with node.http.get("/metrics") as answer:
        page = await answer.text()
    line = 'vllm:num_requests_running{engine="0",model_name="made-up"} '
    return page if running is None or f"{line}{float(running)}" in page else ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": PROMPT, "max_tokens": 10_000}, "prompt"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature"),
        ({"prompt": PROMPT, "n": 3, "temperature": 0}, "n"),
        (
            {"prompt": PROMPT, "kv_transfer_params": {"do_remote_decode": True}},
            "kv_transfer_params",
        ),
        (
            {
                "prompt": PROMPT,
                "kv_transfer_params": {
                    **{"do_reference": True, "do_remote_decode": True},
                    "grant": GRANT,
                },
            },
            "kv_transfer_params",
        ),
        *(
            (
                {
                    "prompt": PROMPT,
                    "kv_transfer_params": {"do_reference": True, "cut_tokens": cuts},
                },
                "kv_transfer_params.cut_tokens",
            )
            for cuts in ([0], [100], [-3], [9, 9], [9, 8], list(range(1, MAX_CUTS + 2)))
        ),
        (
            {"prompt": PROMPT, "kv_transfer_params": {"do_reference": True, "cut_tokens": 7}},
            "kv_transfer_params.cut_tokens",
        ),
    ],
)
async def test_bad_requests_are_named(fields: dict[str, Any], param: str) -> None:
    async with node_server() as node:
        status, answer = await node.complete(**fields)
        assert status == 400
        assert answer["error"]["param"] == param and answer["error"]["code"] == "invalid_request"
        async with node.http.post("/v1/completions/render", json=fields) as rendered:
            refused = await rendered.json()
            assert (rendered.status, refused["error"]["param"]) == (400, param)


async def test_a_request_is_rendered_without_being_computed() -> None:
    async with node_server() as node:
        body = {"prompt": PROMPT, "max_tokens": 3, "stop": ["x"], "stream": True}
        async with node.http.post("/v1/completions/render", json=body) as answer:
            (rendered,) = await answer.json()
        assert rendered["token_ids"] == PROMPT and rendered["model"] == "made-up"
        assert rendered["sampling_params"]["max_tokens"] == 3
        assert rendered["sampling_params"]["stop"] == ["x"]


async def test_a_chat_is_rendered_as_it_is_tokenised() -> None:
    async with node_server(vocab_size=264) as node:
        body = {"messages": MESSAGES}
        async with node.http.post("/v1/chat/completions/render", json=body) as answer:
            rendered = await answer.json()
        async with node.http.post("/tokenize", json=body) as answer:
            assert rendered["token_ids"] == (await answer.json())["tokens"]


async def test_another_model_is_not_found() -> None:
    async with node_server() as node:
        status, answer = await node.complete(prompt=PROMPT, model="another")
        assert status == 404 and "made-up" in answer["error"]["message"]


async def test_without_a_tokenizer_there_are_ids_only() -> None:
    async with node_server(tokenizer=None) as node:
        status, answer = await node.complete(prompt="text")
        assert status == 400 and "token ids" in answer["error"]["message"]
        status, answer = await node.complete(prompt=PROMPT, stop="x")
        assert status == 400 and answer["error"]["param"] == "stop"
        status, answer = await node.complete(prompt=PROMPT, return_token_ids=True)
        assert status == 200 and len(answer["choices"][0]["token_ids"]) == 16


async def test_a_reference_is_cut_as_requested_and_uses_no_cache() -> None:
    """The node has no kvd: a plain request counts as one without the pool, a reference does not."""
    async with node_server(chunk_tokens=64) as node:
        asked = {"prompt": PROMPT, "return_token_ids": True, "temperature": 0.0}
        _, plain = await node.complete(**asked)
        for cuts, used in (([13, 37, 90], [13, 37, 90, 100]), ([7], [7, 64, 100]), ([], [64, 100])):
            params = {"do_reference": True, "cut_tokens": cuts}
            status, answer = await node.complete(**asked, kv_transfer_params=params)
            assert status == 200 and answer["kv_transfer_params"] == {"cut_tokens": used}
            assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        assert 'prfaas_node_unpooled_requests_total{engine="0",model_name="made-up"} 1.0' in (
            await metrics(node)
        )


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "grant": GRANT},
        {"do_remote_prefill": True, "transfer_id": "t-1"},
    ],
)
async def test_half_a_hand_off_without_a_kvd_is_refused_a_plain_request_is_not(
    params: dict[str, Any],
) -> None:
    async with node_server() as node:
        status, answer = await node.complete(prompt=PROMPT, kv_transfer_params=params)
        assert (status, answer["error"]["code"]) == (503, "kvd_unavailable")
        status, _ = await node.complete(prompt=PROMPT)
        assert status == 200
        assert 'prfaas_node_unpooled_requests_total{engine="0",model_name="made-up"} 1.0' in (
            await metrics(node)
        )


async def test_too_many_requests_are_told_to_come_back() -> None:
    async with node_server(max_running=1, max_waiting=2, scales=Scales(time=0.1)) as node:
        asking = [
            asyncio.create_task(node.complete(prompt=PROMPT, max_tokens=2)) for _ in range(12)
        ]
        answers = await asyncio.gather(*asking)
        refused = [answer for status, answer in answers if status == 503]
        assert refused and all(one["error"]["code"] == "overloaded" for one in refused)
        assert any(status == 200 for status, _ in answers)


async def test_draining_finishes_what_has_begun_and_takes_nothing_new() -> None:
    async with node_server(scales=Scales(time=0.1)) as node:
        asking = asyncio.create_task(node.complete(prompt=PROMPT, max_tokens=50))
        while not await metrics(node, running=1):
            pass
        draining = asyncio.create_task(node.runner.drain(HANG_S))
        while await health(node) == 200:
            pass
        status, answer = await node.complete(prompt=PROMPT)
        assert (status, answer["error"]["code"]) == (503, "draining")
        status, answer = await asking
        assert status == 200 and answer["usage"]["completion_tokens"] == 50
        await draining


@pytest.mark.parametrize("stream", [False, True])
async def test_what_draining_cuts_off_does_not_look_complete(stream: bool) -> None:
    async with node_server(scales=Scales(time=0.1)) as node:
        asked = {"prompt": PROMPT, "max_tokens": 3000}
        asking = asyncio.create_task(node.stream(**asked) if stream else node.complete(**asked))
        none = 'vllm:generation_tokens_total{engine="0",model_name="made-up"} 0.0'
        while none in await metrics(node):
            pass
        await node.runner.drain(0.0)
        answer = await asking
        last = answer[-1] if stream else answer[1]
        assert last["error"]["code"] == "draining"


async def health(node: LocalApi) -> int:
    async with node.http.get("/health") as answer:
        return answer.status


async def test_small_pages() -> None:
    async with node_server() as node:
        async with node.http.get("/health") as answer:
            assert answer.status == 200
        async with node.http.get("/version") as answer:
            assert "version" in await answer.json()
        async with node.http.get("/v1/models") as answer:
            (card,) = (await answer.json())["data"]
            assert card["id"] == "made-up" and card["max_model_len"] == 4096
            assert card["prfaas"]["compat"]["block_tokens"] == 64
        async with node.http.post("/tokenize", json={"prompt": "né"}) as answer:
            assert (await answer.json())["tokens"] == [110, 0xC3, 0xA9]
        await node.complete(prompt=PROMPT, max_tokens=3)
        page = await metrics(node)
        for line in (
            'vllm:cache_config_info{block_size="64",',
            'vllm:prompt_tokens_by_source_total{engine="0",model_name="made-up",'
            'source="local_compute"} 100.0',
            'vllm:generation_tokens_total{engine="0",model_name="made-up"} 3.0',
            "vllm:time_to_first_token_seconds_count",
            "vllm:num_requests_waiting{",
            "vllm:kv_cache_usage_perc{",
        ):
            assert line in page, line


# Chats --------------------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


async def chat(node: LocalApi, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with node.http.post("/v1/chat/completions", json=fields) as answer:
        return answer.status, await answer.json()


async def tokenize(node: LocalApi, **fields: Any) -> list[int]:
    async with node.http.post("/tokenize", json=fields) as answer:
        assert answer.status == 200
        ids: list[int] = (await answer.json())["tokens"]
        return ids


async def test_a_chat_is_a_completion_of_the_rendered_template() -> None:
    async with node_server(vocab_size=264) as node:
        ids = await tokenize(node, messages=MESSAGES)
        assert ids[-len("assistant\n") :] == [*b"assistant\n"]
        options = {"max_tokens": 9, "seed": 4, "return_token_ids": True}
        status, told = await chat(node, messages=MESSAGES, **options)
        _, plain = await node.complete(prompt=ids, **options)
        assert status == 200 and told["object"] == "chat.completion"
        assert told["id"].startswith("chatcmpl-") and told["usage"] == plain["usage"]
        (choice,), (same,) = told["choices"], plain["choices"]
        assert choice["message"] == {"role": "assistant", "content": same["text"]}
        assert choice["token_ids"] == same["token_ids"] and choice["finish_reason"] == "length"


async def test_a_streamed_chat_opens_with_its_role() -> None:
    async with node_server(vocab_size=264) as node:
        asked = {"messages": MESSAGES, "max_completion_tokens": 9, "seed": 4}
        _, whole = await chat(node, **asked)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        async with node.http.post("/v1/chat/completions", json=asked) as answer:
            opening, *rest, usage = await pieces(answer)
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {piece["object"] for piece in rest} == {"chat.completion.chunk"}
        said = "".join(piece["choices"][0]["delta"]["content"] for piece in rest)
        assert said == whole["choices"][0]["message"]["content"]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["choices"] == [] and usage["usage"] == whole["usage"]


async def test_a_chat_that_says_no_length_may_fill_the_context() -> None:
    async with node_server(vocab_size=264, max_tokens=200) as node:
        status, told = await chat(node, messages=MESSAGES, ignore_eos=True)
        assert status == 200 and told["usage"]["total_tokens"] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "nobody"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": MESSAGES, "logprobs": True}, "logprobs"),
    ],
)
async def test_bad_chats_are_named(fields: dict[str, Any], param: str) -> None:
    async with node_server(vocab_size=264) as node:
        status, answer = await chat(node, **fields)
        assert status == 400 and answer["error"]["param"] == param


async def test_a_client_that_is_found_gone_by_writing_to_it_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        engine = emulated(scales=FAST)
        async with (
            asyncio.timeout(HANG_S),
            local_api(engine, BYTES, handler_cancellation=False) as node,
        ):
            asked = {"prompt": PROMPT, "max_tokens": 3_000, "stream": True, "ignore_eos": True}
            async with node.http.post("/v1/completions", json=asked) as answer:
                await answer.content.readany()
                answer.close()
            await node.runner.drain(HANG_S)
    assert "cancelled: this node" in caplog.text  # long before its length
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
