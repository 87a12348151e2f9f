"""Every sampling parameter over HTTP, with a tiny model: whole and streamed, both endpoints."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas.engine.checkpoint.tokenizer import EOS, token_id
from prfaas.engine.hf import HFEngine
from tests.engine.hf import models
from tests.node.local_api import BYTES, LocalApi, local_api, pieces
from tests.waiting import HANG_S

PROMPT = models.prompt("qwen3", 30)
LETTERS = list(range(ord("a"), ord("z") + 1))
GREEDY: dict[str, Any] = {
    **{"prompt": PROMPT, "temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
    **{"return_token_ids": True, "skip_special_tokens": False},
}
CHAT: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True},
    **{"temperature": 0.0, "return_token_ids": True, "skip_special_tokens": False},
}


@asynccontextmanager
async def node_server(*, with_tokenizer: bool = True) -> AsyncIterator[LocalApi]:
    engine = HFEngine(models.loaded("qwen3"), chunk_tokens=64)
    tokenizer = BYTES if with_tokenizer else None
    async with asyncio.timeout(HANG_S), local_api(engine, tokenizer) as node:
        yield node


async def whole_choice(node: LocalApi, **fields: Any) -> dict[str, Any]:
    status, answer = await node.complete(**{**GREEDY, **fields})
    assert status == 200, answer
    found: dict[str, Any]
    (found,) = answer["choices"]
    return found


async def choice(node: LocalApi, **fields: Any) -> dict[str, Any]:
    """The only choice, which is the same in pieces."""
    whole = await whole_choice(node, **fields)
    parts = [piece["choices"][0] for piece in await node.stream(**{**GREEDY, **fields})]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    for field in ("finish_reason", "stop_reason"):
        assert parts[-1][field] == whole[field]
    if whole["logprobs"] is not None:
        for field, values in whole["logprobs"].items():
            shown = [part["logprobs"][field] for part in parts if part["logprobs"] is not None]
            assert [one for some in shown for one in some] == values
    return whole


async def test_parameters_that_change_the_choice() -> None:
    async with node_server() as node:
        free = (await whole_choice(node))["token_ids"]
        first = free[0]
        assert (await whole_choice(node, logit_bias={"65": 100}))["text"] == "A" * 8
        assert (await whole_choice(node, allowed_token_ids=[65]))["text"] == "A" * 8
        assert first not in (await whole_choice(node, logit_bias={str(first): -100}))["token_ids"]
        allowed = {"allowed_token_ids": [65, 66], "logit_bias": {"65": 50}}
        assert (await whole_choice(node, **allowed, bad_words=["AA"]))["text"] == "AB" * 4
        assert (await whole_choice(node, **allowed, bad_words=["A"]))["text"] == "B" * 8
        letters = {"allowed_token_ids": LETTERS, "max_tokens": 16}
        plain = (await whole_choice(node, **letters))["token_ids"]
        assert len(set(plain)) < 16  # otherwise there is nothing to penalise
        for field, value in (
            *(("presence_penalty", 2.0), ("frequency_penalty", 2.0)),
            *(("repetition_penalty", 100.0), ("repetition_penalty", 0.01)),
        ):
            changed = (await whole_choice(node, **letters, **{field: value}))["token_ids"]
            assert changed != plain, field
        hot: dict[str, Any] = {"temperature": 2.0, "seed": 5}
        assert (await whole_choice(node, **hot, top_k=1))["token_ids"] == free
        assert (await whole_choice(node, **hot, min_p=1.0))["token_ids"] == free
        assert (await whole_choice(node, **hot, top_p=1e-6))["token_ids"] == free
        assert (await whole_choice(node, **hot))["token_ids"] != free


async def test_stop_tokens_and_their_text() -> None:
    async with node_server() as node:
        fields: dict[str, Any] = {"allowed_token_ids": [65, 66], "logit_bias": {"65": 50}}
        fields |= {"bad_words": ["AA"]}  # the answer is ABABABAB
        stopped = await choice(node, **fields, stop_token_ids=[66])
        assert (stopped["text"], stopped["token_ids"]) == ("A", [65, 66])
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", 66)
        included = await choice(
            node, **fields, stop_token_ids=[66], include_stop_str_in_output=True
        )
        assert (included["text"], included["stop_reason"]) == ("AB", 66)
        later = await choice(
            node, stop_token_ids=[66], min_tokens=4, allowed_token_ids=[65, 66], ignore_eos=False
        )
        assert later["text"].startswith("AAAA")
        for more, text in (
            ({"stop": "BA"}, "A"),
            ({"stop": "BA", "include_stop_str_in_output": True}, "ABA"),
            ({"stop": "BA", "min_tokens": 4}, "ABA"),
            ({"stop": ["BAB", "BA"], "include_stop_str_in_output": True}, "ABA"),
        ):
            ended = await choice(node, **fields, **more)
            assert (ended["text"], ended["stop_reason"]) == (text, "BA")


async def test_special_tokens_and_the_end_of_the_text() -> None:
    async with node_server() as node:
        eos = token_id(EOS)
        fields: dict[str, Any] = {"allowed_token_ids": [eos], "ignore_eos": True, "max_tokens": 2}
        assert (await choice(node, **fields))["text"] == EOS * 2
        assert (await choice(node, **fields, skip_special_tokens=True))["text"] == ""
        fields["ignore_eos"] = False
        ended = await choice(node, **fields)
        assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("", "stop", None)
        assert (await choice(node, **fields, include_stop_str_in_output=True))["text"] == EOS


async def test_log_probabilities_of_completions() -> None:
    async with node_server() as node:
        answer = await choice(node, logprobs=3, allowed_token_ids=LETTERS)
        shown = answer["logprobs"]
        assert shown.keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
        assert all(len(values) == 8 for values in shown.values())
        assert "".join(shown["tokens"]) == answer["text"]
        offsets = [sum(map(len, shown["tokens"][:n])) for n in range(8)]
        assert shown["text_offset"] == offsets
        free = (await choice(node, logprobs=3, return_tokens_as_token_ids=True))["logprobs"]
        for token, value, top in zip(
            *(free[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert len(top) == 3 and top[token] == value == max(top.values()) <= 0.0
        none = (await choice(node, logprobs=0))["logprobs"]
        assert [list(top) for top in none["top_logprobs"]] == [[token] for token in none["tokens"]]
        # They are the model's own, before the request's changes.
        changed = {"logit_bias": {"65": 100}, "max_tokens": 1, "return_tokens_as_token_ids": True}
        forced = (await choice(node, logprobs=2, **changed))["logprobs"]
        assert list(forced["top_logprobs"][0])[0] == forced["tokens"][0] == "token_id:65"
        assert len(forced["top_logprobs"][0]) == 3
        assert forced["token_logprobs"][0] < free["token_logprobs"][0]


async def test_log_probabilities_of_chats() -> None:
    async with node_server() as node:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2, "logit_bias": {"65": 100}}
        async with node.http.post("/v1/chat/completions", json=body) as response:
            (whole,) = (await response.json())["choices"]
        async with node.http.post(
            "/v1/chat/completions", json={**body, "stream": True}
        ) as response:
            parts = [piece["choices"][0] for piece in await pieces(response)]
        content = whole["logprobs"]["content"]
        assert whole["message"]["content"] == "A" * 6 and len(content) == 6
        for entry in content:
            assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
            assert entry["token"] == "A" and entry["bytes"] == [65]
            first, second = entry["top_logprobs"]  # vLLM counts the chosen token
            assert first == {name: entry[name] for name in ("token", "logprob", "bytes")}
            assert second["logprob"] > first["logprob"] or second["token"] != "A"
            assert math.exp(first["logprob"]) + math.exp(second["logprob"]) <= 1.0 + 1e-6
        shown = [part["logprobs"]["content"] for part in parts if part["logprobs"] is not None]
        assert [entry for some in shown for entry in some] == content
        async with node.http.post(
            "/v1/chat/completions", json={**CHAT, "logprobs": True}
        ) as response:
            (bare,) = (await response.json())["choices"]
        assert [entry["top_logprobs"] for entry in bare["logprobs"]["content"]] == [[]] * 6


async def test_echo_puts_the_prompt_before_the_answer() -> None:
    async with node_server() as node:
        for prompt, text in (("some text", "some text"), ([104, 105, token_id(EOS)], "hi" + EOS)):
            plain = await choice(node, prompt=prompt)
            echoed = await choice(node, prompt=prompt, echo=True)
            assert echoed["text"] == text + plain["text"]
            assert echoed["token_ids"] == plain["token_ids"]
        alone = await choice(node, prompt="some text", echo=True, max_tokens=0)
        assert alone["text"] == "some text"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"264": 1}}, "logit_bias"),
        ({"allowed_token_ids": [264]}, "allowed_token_ids"),
        ({"stop_token_ids": [264]}, "stop_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a" * 1025]}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"unheard_of": None}, "unheard_of"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], [264]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_anything_is_computed(
    fields: dict[str, Any], param: str
) -> None:
    async with node_server() as node:
        for path in ("/v1/completions", "/v1/completions/render"):
            async with node.http.post(path, json={**GREEDY, **fields}) as response:
                assert response.status == 400, path
                assert (await response.json())["error"]["param"] == param


async def test_what_needs_text_needs_a_tokenizer() -> None:
    async with node_server(with_tokenizer=False) as node:
        for fields in ({"bad_words": ["a"]}, {"echo": True}, {"logprobs": 1}):
            status, answer = await node.complete(**GREEDY, **fields)
            assert (status, answer["error"]["param"]) == (400, *fields)
        named = await choice(node, logprobs=1, return_tokens_as_token_ids=True)
        assert named["logprobs"]["tokens"] == [f"token_id:{id}" for id in named["token_ids"]]


async def test_a_request_that_leaves_no_token_fails() -> None:
    async with node_server() as node:
        status, answer = await node.complete(**GREEDY, allowed_token_ids=[65], bad_words=["A"])
        assert status == 500 and "allowed_token_ids" in answer["error"]["message"]
