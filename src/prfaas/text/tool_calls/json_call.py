"""One call as a JSON object: `{"name": "f", "arguments": {...}}`.

Arguments are passed on as they arrive when the name comes first, which is what models write.
Otherwise the call is returned when its object is complete.
"""

from __future__ import annotations

import json
import re
import string
from typing import Literal

from prfaas.text.tool_calls.pieces import ArgumentsPiece, CallStart, Piece

# Beyond these characters a name is not looked for until the object is complete: looking again with
# every token would take quadratic time.
MAX_HEADER = 4096
_NAME = r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
_OUTSIDE_STRINGS = frozenset('{}[]:," \t\r\n+-.' + string.digits + string.ascii_letters)


class ObjectScanner:
    """Finds the end of a JSON object. Checks brackets and strings, not more."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.is_broken = False

    def end(self, text: str) -> int | None:
        """The position after the object's last character. With `is_broken` it is the position of a
        character that no JSON has there. None: the object continues after `text`."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                continue
            if character not in _OUTSIDE_STRINGS:
                self.is_broken = True
                return position
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return None


class JsonCall:
    """Reads one call from its opening bracket on."""

    def __init__(self, index: int, arguments_key: str) -> None:
        """`arguments_key`: an expression for the name of the arguments."""
        self._index = index
        self._keys = re.compile(arguments_key)
        self._header = re.compile(_NAME + rf'"(?:{arguments_key})"\s*:\s*(?=\{{)')
        self._object = ObjectScanner()
        self._arguments = ObjectScanner()
        self._phase: Literal["header", "arguments", "rest", "over"] = "header"
        # What was read while the call has not begun. Not a call, if it is left at the end.
        self.held = ""

    @property
    def is_over(self) -> bool:
        return self._phase == "over"

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Pieces, and the text after the call."""
        pieces: list[Piece] = []
        if self._phase == "header":
            text = self._read_header(text, pieces)
        if self._phase == "arguments":
            end = self._arguments.end(text)
            pieces.append(ArgumentsPiece(self._index, text[:end]))
            if end is None:
                return pieces, ""
            self._phase = "over" if self._arguments.is_broken else "rest"
            self._object = ObjectScanner(depth=1)
            text = text[end:]
        if self._phase == "rest":
            end = self._object.end(text)
            if end is None:
                return pieces, ""
            self._phase = "over"
            text = text[end:]
        return pieces, text if self.is_over else ""

    def _read_header(self, text: str, pieces: list[Piece]) -> str:
        """The text that is not read yet."""
        could_match = len(self.held) < MAX_HEADER
        end = self._object.end(text)
        self.held += text[:end]
        found = self._header.match(self.held[:MAX_HEADER]) if could_match else None
        if found is not None:
            name = _decoded(found[1])
            if isinstance(name, str):
                after = self.held[found.end() :] + (text[end:] if end is not None else "")
                pieces.append(CallStart(self._index, name))
                self.held, self._phase = "", "arguments"
                return after
        if end is None:
            return ""
        self._phase = "over"
        if not self._object.is_broken:
            pieces += self._whole_call()
        return text[end:]

    def _whole_call(self) -> list[Piece]:
        call = _decoded(self.held)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        key = next((key for key in call if self._keys.fullmatch(key)), None)
        if key is None or not isinstance(call[key], dict):
            return []
        self.held = ""
        arguments = json.dumps(call[key], ensure_ascii=False)
        return [CallStart(self._index, call["name"]), ArgumentsPiece(self._index, arguments)]


def _decoded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
