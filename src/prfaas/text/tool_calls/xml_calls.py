"""Calls of Qwen3-Coder:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Tokyo
    </parameter>
    </function>
    </tool_call>

A value is text where the function's schema says that it is a string, else JSON. A call is returned
when it is complete. As in vLLM, text after the first call is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.text.tool_calls.pieces import (
    ArgumentsPiece,
    CallStart,
    Piece,
    TextPiece,
    ToolCallParser,
    beginning_of,
    joined,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class XmlCalls(ToolCallParser):
    def __init__(self, functions: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._properties = {function["name"]: _properties(function) for function in functions}
        self._searched = 0  # of these characters, for the end of a call
        self._is_inside = False

    def finish(self) -> list[Piece]:
        rest, self._text = self._text, ""
        if self._is_inside:
            return joined(self._call(rest, ""))
        return joined([TextPiece("" if self._calls else rest)])

    def _read(self, pieces: list[Piece]) -> bool:
        """Reads up to the next tag. False when more text is needed."""
        mark = CLOSE if self._is_inside else OPEN
        at = self._text.find(mark, self._searched)
        if at < 0 and self._is_inside:
            self._searched = max(0, len(self._text) - len(CLOSE))
            return False
        end = at if at >= 0 else len(self._text) - beginning_of(mark, self._text)
        read = self._text[:end]
        self._text = self._text[end + len(mark) if at >= 0 else end :]
        self._searched = 0
        if self._is_inside:
            pieces += self._call(read, CLOSE)
        elif not self._calls:
            pieces.append(TextPiece(read))
        if at >= 0:
            self._is_inside = not self._is_inside
        return at >= 0

    def _call(self, body: str, close: str) -> list[Piece]:
        """The call, or its text where it is not one."""
        found = _CALL.fullmatch(body)
        arguments = self._arguments(found[1], found[2]) if found is not None else None
        if found is None or arguments is None:
            return [TextPiece(OPEN + body + close)]
        self._calls += 1
        index = self._calls - 1
        text = json.dumps(arguments, ensure_ascii=False)
        return [CallStart(index, found[1]), ArgumentsPiece(index, text)]

    def _arguments(self, function: str, body: str) -> dict[str, Any] | None:
        properties = self._properties.get(function, {})
        arguments: dict[str, Any] = {}
        position = 0
        while position < len(body.rstrip()):
            found = _PARAMETER.match(body, position)
            if found is None:
                return None
            arguments[found[1]] = _value(found[2], properties.get(found[1]))
            position = found.end()
        return arguments


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _value(text: str, schema: object) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
