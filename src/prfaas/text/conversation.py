"""A chat request's messages and tools as vLLM hands them to a template, before it renders them.

Gateway and engine must come to the same tokens, so this follows vLLM where it departs from the
client's JSON: content parts, absent content, arguments of tool calls, defaults of tools. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prfaas.errors import InputError

_TEXT_OF = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_OF_TOOLS = ("name", "description", "parameters", "strict", "defer_loading")
_ALWAYS = _OF_TOOLS[:3]  # null when absent


def is_multimodal(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether anything in it is not text."""
    return any(
        isinstance(part, dict) and part.get("type") not in tuple(_TEXT_OF)  # may be no string
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def conversation(
    messages: Sequence[Mapping[str, Any]], *, content_is_parts: bool
) -> list[dict[str, Any]]:
    """InputError names what is wrong."""
    return [
        _message(message, f"messages.{index}", content_is_parts)
        for index, message in enumerate(messages)
    ]


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    schemas = []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError("no function with a name", where=f"tools.{index}", fix="describe it")
        described = {
            key: function.get(key)
            for key in _OF_TOOLS
            if key in _ALWAYS or function.get(key) is not None
        }
        schemas.append({"type": tool.get("type", "function"), "function": described})
    return schemas


def _message(message: Mapping[str, Any], at: str, content_is_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InputError("no role", where=at, fix='give one, such as "user"')
    texts = _texts(message.get("content"), f"{at}.content")
    told: dict[str, Any] = {"role": role}
    if content_is_parts and role != "tool":  # templates take a tool's answer as text
        told["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        told["content"] = "\n".join(texts)
    if isinstance(message.get("name"), str):
        told["name"] = message["name"]
    if role == "tool" and "tool_call_id" in message:
        told["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        reasoning = message.get("reasoning")
        if reasoning is not None:
            told |= {"reasoning": reasoning, "reasoning_content": reasoning}
        calls = message.get("tool_calls")
        if calls is not None and calls != []:
            told["tool_calls"] = _calls(calls, f"{at}.tool_calls")
    return told


def _texts(content: object, at: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InputError("neither text nor parts", where=at, fix="send a string")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InputError("not a part", where=f"{at}.{index}", fix="send an object with a type")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _TEXT_OF:
            continue  # pictures and sounds are no text; see `is_multimodal`
        text = part.get(_TEXT_OF[kind])
        if text is None:
            continue
        if not isinstance(text, str):
            raise InputError("not a string", where=f"{at}.{index}.{_TEXT_OF[kind]}")
        texts.append(text)
    return texts


def _calls(calls: object, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InputError("not a list", where=at)
    return [_call(call, f"{at}.{index}") for index, call in enumerate(calls)]


def _call(call: object, at: str) -> dict[str, Any]:
    """Templates read the arguments as an object; clients send them as JSON in a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InputError("no function", where=at, fix="send the call as the model made it")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InputError(f"not JSON: {error}", where=f"{at}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}
