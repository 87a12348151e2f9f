"""How a response shows tool calls, token by token, without an engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from prfaas.engine.api import Finished, Sampling, Token
from prfaas.errors import InputError
from prfaas.node.responses import CHAT, ResponseBuilder
from prfaas.node.structured.tool_calls import ToolCallReader
from prfaas.node.structured.tool_choice import (
    NamedFunction,
    NamedTool,
    ToolChoice,
    ToolUse,
    plan_tool_use,
)
from prfaas.text import AnswerText
from prfaas.text.tool_calls.forms import HERMES, XML
from tests.node.local_api import BYTES

TOOL = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 3}}\n</tool_call>'
NAMED = NamedTool(NamedFunction("get_weather"))


def use(choice: ToolChoice = "auto", *, parallel: bool = True) -> ToolUse:
    planned = plan_tool_use([TOOL], choice, parallel, lambda: HERMES)
    assert planned is not None
    return planned


def builder(use: ToolUse, stops: tuple[str, ...] = ()) -> ResponseBuilder:
    return ResponseBuilder(
        shape=CHAT,
        id="chatcmpl-1",
        model="m",
        created_s=0,
        prompt_tokens=1,
        return_token_ids=False,
        answer=AnswerText(BYTES.decode_all, stops),
        sampling=Sampling(),
        calls=ToolCallReader(use),
    )


def answer(
    use: ToolUse, text: str, reason: Any = "stop", stops: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The choice of the whole response."""
    whole = builder(use, stops)
    texts = [whole.token(Token(byte)) for byte in text.encode()]
    if whole.finish_reason is None:
        texts.append(whole.finished(Finished(reason)))
    choice: dict[str, Any]
    (choice,) = whole.whole("".join(texts))["choices"]
    return choice


def functions(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in made]


def test_calls_and_the_text_before_them() -> None:
    choice = answer(use(), "Let me see. ü " + CALL + "\n" + CALL)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see. ü "
    assert functions(choice) == [("get_weather", {"days": 3})] * 2
    ids = {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 2 and all(one.startswith("chatcmpl-tool-") for one in ids)
    assert all("index" not in call for call in choice["message"]["tool_calls"])


def test_only_one_call_where_calls_are_not_parallel() -> None:
    choice = answer(use(parallel=False), CALL + CALL)
    assert functions(choice) == [("get_weather", {"days": 3})]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("choice", "reason", "content"),
    [("auto", "tool_calls", None), ("required", "tool_calls", ""), (NAMED, "stop", "")],
)
def test_how_an_answer_with_a_call_ends(
    choice: ToolChoice, reason: str, content: str | None
) -> None:
    """As in vLLM, and in OpenAI's API."""
    made = answer(use(choice), CALL)
    assert (made["finish_reason"], made["message"]["content"]) == (reason, content)


def test_answers_without_a_call() -> None:
    for text in ("No < call.", "", "<tool_call>\nno\n</tool_call>", "<tool_c"):
        made = answer(use(), text)
        assert made["message"] == {"role": "assistant", "content": text}
        assert made["finish_reason"] == "stop"


def test_an_answer_that_is_too_long() -> None:
    made = answer(use(), CALL[:57], "length")
    assert made["finish_reason"] == "length"
    assert made["message"]["tool_calls"][0]["function"]["arguments"] == '{"days":'


def test_a_stop_string_ends_the_calls() -> None:
    made = answer(use(), CALL + "STOP" + CALL, stops=("STOP",))
    assert (made["finish_reason"], made["stop_reason"]) == ("tool_calls", "STOP")
    assert len(functions(made)) == 1


def test_pieces_are_sent_as_soon_as_they_are_certain() -> None:
    streamed, sent = builder(use()), list[dict[str, Any]]()
    for byte in ("Hi" + CALL).encode():
        text = streamed.token(Token(byte))
        if text:  # as the server does
            sent.append(delta(streamed.piece(text)))
    streamed.finished(Finished("stop"))
    last = msgspec.json.decode(streamed.piece("").removeprefix(b"data: "))["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert [part["content"] for part in sent[:2]] == ["H", "i"]
    ((start,), *more) = (part["tool_calls"] for part in sent[2:])
    assert start["index"] == 0 and start["type"] == "function"
    assert start["function"] == {"name": "get_weather", "arguments": "{"}
    assert all(set(one) == {"index", "function"} for (one,) in more)
    assert "{" + "".join(one["function"]["arguments"] for (one,) in more) == '{"days": 3}'


def delta(piece: bytes) -> dict[str, Any]:
    found: dict[str, Any]
    found = msgspec.json.decode(piece.removeprefix(b"data: "))["choices"][0]["delta"]
    return found


def test_forced_calls_need_a_grammar() -> None:
    assert use("auto").grammar(lambda _: None) is None
    plain = use("required").grammar(lambda _: None)
    special = use(NAMED).grammar(lambda _: 7)
    assert plain is not None and '"<tool_call>"' in plain.text and ")*" in plain.text
    assert special is not None and "<[7]>" in special.text and ")*" not in special.text
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for tool, choice, where in ((TOOL, "required", "tool_choice"), (strict, "auto", "tools")):
        planned = plan_tool_use([tool], choice, True, lambda: XML)  # type: ignore[arg-type]
        assert planned is not None
        with pytest.raises(InputError) as caught:
            planned.grammar(lambda _: None)
        assert caught.value.where == where
