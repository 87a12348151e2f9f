"""A chat request's messages and tools, in the form in which vLLM passes them to a template.

The gateway and the engine must get the same tokens, so this follows vLLM where vLLM changes the
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
    """Whether a message has a part that is not text."""
    return any(
        # A tuple, because the type may be unhashable: the client's JSON is unchecked.
        isinstance(part, dict) and part.get("type") not in tuple(_TEXT_OF)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def conversation(
    messages: Sequence[Mapping[str, Any]], *, content_is_parts: bool
) -> list[dict[str, Any]]:
    """The messages for the template. InputError names the field."""
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
            raise InputError(
                "the tool has no function with a name",
                where=f"tools.{index}",
                fix="describe the function",
            )
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
        raise InputError("the message has no role", where=at, fix='add one, such as "user"')
    texts = _texts(message.get("content"), f"{at}.content")
    rendered: dict[str, Any] = {"role": role}
    if content_is_parts and role != "tool":  # templates expect a tool's answer as text
        rendered["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        rendered["content"] = "\n".join(texts)
    if isinstance(message.get("name"), str):
        rendered["name"] = message["name"]
    if role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        reasoning = message.get("reasoning")
        if reasoning is not None:
            rendered |= {"reasoning": reasoning, "reasoning_content": reasoning}
        calls = message.get("tool_calls")
        if calls is not None and calls != []:
            rendered["tool_calls"] = _calls(calls, f"{at}.tool_calls")
    return rendered


def _texts(content: object, at: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InputError(
            "content is neither a string nor a list of parts", where=at, fix="send a string"
        )
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InputError(
                "the part is not an object", where=f"{at}.{index}", fix="send an object with a type"
            )
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _TEXT_OF:
            continue  # images and audio are skipped; see `is_multimodal`
        text = part.get(_TEXT_OF[kind])
        if text is None:
            continue
        if not isinstance(text, str):
            raise InputError("the text is not a string", where=f"{at}.{index}.{_TEXT_OF[kind]}")
        texts.append(text)
    return texts


def _calls(calls: object, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InputError("tool_calls is not a list", where=at)
    return [_call(call, f"{at}.{index}") for index, call in enumerate(calls)]


def _call(call: object, at: str) -> dict[str, Any]:
    """A tool call with its arguments as an object. Clients send the arguments as a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InputError(
            "the tool call has no function", where=at, fix="send the call as the model made it"
        )
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InputError(
                f"arguments are not JSON: {error}", where=f"{at}.function.arguments"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
