"""What vLLM makes of a client's messages and tools before it renders them."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.errors import InputError
from prfaas.text.chat import Chat
from prfaas.text.conversation import conversation, is_multimodal, tool_schemas

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


def one(message: dict[str, Any], *, content_is_parts: bool = False) -> dict[str, Any]:
    (told,) = conversation([message], content_is_parts=content_is_parts)
    return told


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [
        ("a", "a", [{"type": "text", "text": "a"}]),
        (PARTS, "a\nb", PARTS),
        (["a", {"type": "input_text", "text": "b"}], "a\nb", PARTS),
        ([{"type": "refusal", "refusal": "no"}], "no", [{"type": "text", "text": "no"}]),
        (None, "", []),
        ([*PARTS, PICTURE], "a\nb", PARTS),
    ],
)
def test_content_is_text_or_parts(content: Any, text: str, parts: Any) -> None:
    message = {"role": "user", "content": content}
    assert one(message)["content"] == text
    assert one(message, content_is_parts=True)["content"] == parts


def test_what_a_message_keeps_depends_on_who_speaks() -> None:
    more = {"name": "n", "tool_call_id": "c", "reasoning": "r", "tool_calls": [], "other": 1}
    user = {"role": "user", "content": "x", "name": "n"}
    assert one(more | user) == user
    answer = one({"role": "tool", "content": PARTS, **more}, content_is_parts=True)
    assert answer == {"role": "tool", "content": "a\nb", "name": "n", "tool_call_id": "c"}
    said = {"role": "assistant", "content": "x", "name": "n"}
    assert one(more | said) == said | {"reasoning": "r", "reasoning_content": "r"}


def test_a_tools_description_has_vllms_fields() -> None:
    tool = {"function": {"strict": True, "name": "f", "mine": 1}, "mine": 1}
    described = {"name": "f", "description": None, "parameters": None, "strict": True}
    assert tool_schemas([tool]) == [{"type": "function", "function": described}]
    assert tool_schemas([]) is tool_schemas(None) is None
    with pytest.raises(InputError, match=r"tools\.0"):
        tool_schemas([{"type": "function"}])


def test_effort_switches_thinking_on_unless_the_client_says_otherwise() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert Chat(messages).variables == {}
    low = Chat(messages, reasoning_effort="low")
    assert low.variables == {"reasoning_effort": "low", "enable_thinking": True}
    said = {"enable_thinking": False}
    told = Chat(messages, reasoning_effort="low", chat_template_kwargs=said).variables
    assert told == {"reasoning_effort": "low", "enable_thinking": False}


def test_pictures_are_noticed() -> None:
    assert is_multimodal([{"role": "user", "content": [*PARTS, PICTURE]}])
    assert not is_multimodal([{"role": "user", "content": PARTS}, {"role": "user"}])
