"""Tool calls over HTTP with a tiny model: chosen, required and named, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from prfaas.engine.checkpoint.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tokenizer
from prfaas.engine.hf import HFEngine
from prfaas.text import ModelTokenizer
from prfaas.text.template import ChatTemplate
from prfaas.text.tool_calls import kimi
from tests.engine.emulated.builders import emulated
from tests.engine.hf import models
from tests.node.local_api import BYTES, LocalApi, local_api, pieces
from tests.waiting import HANG_S

# It shows the form, but not the tools: a long prompt would take longer.
HERMES_TEMPLATE = "{# <tool_call> #}" + CHAT_TEMPLATE
HERMES = ModelTokenizer(build_tokenizer(), {"default": ChatTemplate(HERMES_TEMPLATE, {})})
# Short names: every byte is a token.
FUNCTION = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
OTHER = {"name": "g", "parameters": {"type": "object", "additionalProperties": False}}
TOOLS = [{"type": "function", "function": function} for function in (FUNCTION, OTHER)]
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'
# A model without training would write blanks for ever, where JSON allows any number.
NO_BLANKS = {str(ord(blank)): -100 for blank in " \n\r\t"}
CHAT: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS},
    **{"max_tokens": 200, "logit_bias": NO_BLANKS},
}


def kimi_tokenizer() -> ModelTokenizer:
    """The marks are special tokens, which no text can write."""
    marks = iter((kimi.SECTION, kimi.SECTION_END, kimi.CALL, kimi.ARGUMENTS, kimi.CALL_END))
    kept = ("<|eos|>", "<|im_start|>", "<|im_end|>")
    special = [token if token in kept else next(marks) for token in SPECIAL_TOKENS]
    written = json.loads(build_tokenizer().to_str())
    written["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    template = CHAT_TEMPLATE + "{# " + kimi.SECTION + " #}"
    return ModelTokenizer(tokenizer, {"default": ChatTemplate(template, {})})


@asynccontextmanager
async def tool_server(tokenizer: ModelTokenizer = HERMES) -> AsyncIterator[LocalApi]:
    engine = HFEngine(models.loaded("qwen3"), chunk_tokens=64)
    async with asyncio.timeout(HANG_S), local_api(engine, tokenizer) as node:
        yield node


async def chat(node: LocalApi, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with node.http.post("/v1/chat/completions", json={**CHAT, **fields}) as answer:
        return answer.status, await answer.json()


async def choice(node: LocalApi, **fields: Any) -> dict[str, Any]:
    """The only choice, which is the same in pieces."""
    status, answer = await chat(node, **fields)
    assert status == 200, answer
    whole: dict[str, Any]
    (whole,) = answer["choices"]
    body = {**CHAT, **fields, "stream": True}
    async with node.http.post("/v1/chat/completions", json=body) as response:
        parts = [piece["choices"][0] for piece in await pieces(response)]
    content, calls = "", list[dict[str, Any]]()
    for part in parts:
        content += part["delta"].get("content") or ""
        for delta in part["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                assert delta["id"] and delta["type"] == "function"
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    message = whole["message"]
    assert (message["content"] or "") == content
    assert [call["function"] for call in message.get("tool_calls", ())] == calls
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    return whole


def calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in made]


async def check_chosen(node: LocalApi) -> None:
    """The grammar makes the model write this text."""
    called = await choice(node, structured_outputs={"choice": ["So. " + CALL]})
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] == "So. "
    assert calls(called) == [("f", {"n": 3})]


async def check_forced(node: LocalApi, choice_: Any, seed: int, *, parallel: bool) -> None:
    made = await choice(
        node, tool_choice=choice_, seed=seed, temperature=1.2, parallel_tool_calls=parallel
    )
    assert made["message"]["content"] == ""
    found = calls(made)
    assert len(found) == 1 or (len(found) > 1 and parallel and choice_ == "required")
    for name, arguments in found:
        if name == "g":
            assert arguments == {} and choice_ == "required"
        else:
            assert name == "f" and 0 <= arguments["n"] <= 99 and len(arguments) == 1
    # As in OpenAI's API, a named function's call is not a reason.
    assert made["finish_reason"] == ("tool_calls" if choice_ == "required" else "stop")


async def test_a_call_that_is_forced() -> None:
    async with tool_server() as node:
        await check_forced(node, "required", 0, parallel=False)


@pytest.mark.slow
async def test_calls_that_are_chosen_and_more_that_are_forced() -> None:
    async with tool_server() as node, asyncio.TaskGroup() as tasks:
        tasks.create_task(check_chosen(node))
        for seed in range(10, 14):
            tasks.create_task(check_forced(node, "required", seed, parallel=False))
            tasks.create_task(check_forced(node, NAMED, seed, parallel=True))


async def test_marks_that_are_special_tokens() -> None:
    async with tool_server(kimi_tokenizer()) as node:
        made = await choice(node, tool_choice=NAMED, seed=1)
        (call,) = made["message"]["tool_calls"]
        assert call["id"].startswith("functions.f:") and calls(made)[0][0] == "f"


async def test_what_cannot_be_served_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"detokenize": False}, "tools"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ]
    broken = {"name": "f", "parameters": {"type": "foo"}}
    cases.append(({"tools": [{"function": broken}], "tool_choice": "required"}, "tools"))
    async with tool_server() as node:
        for fields, param in cases:
            for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
                async with node.http.post(path, json={**CHAT, **fields}) as answer:
                    error = (await answer.json())["error"]
                    assert answer.status == 400 and error["param"] == param, (fields, error)


async def test_an_engine_without_logits_and_a_template_without_a_known_form() -> None:
    fields = {**CHAT, "logit_bias": None}
    for tokenizer, choice, status in (
        *((BYTES, "auto", 400), (BYTES, "none", 200)),
        *((HERMES, "auto", 200), (HERMES, "required", 400)),
    ):
        async with local_api(emulated(vocab_size=264), tokenizer) as node:
            body = {**fields, "tool_choice": choice}
            async with node.http.post("/v1/chat/completions/render", json=body) as answer:
                assert answer.status == status
                if status == 400:
                    assert (await answer.json())["error"]["param"] == "tools"
