"""Calls of Kimi K2, between special tokens:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
    <|tool_call_argument_begin|>{"city": "Tokyo"}<|tool_call_end|><|tool_calls_section_end|>

`functions.get_weather:0` is the call's id. As in vLLM, text after the section is dropped.
"""

from __future__ import annotations

import re
from typing import Literal

from prfaas.text.tool_calls.pieces import (
    ArgumentsPiece,
    CallStart,
    Piece,
    TextPiece,
    ToolCallParser,
    beginning_of,
    joined,
)

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ID = re.compile(r"(?:[^.]*\.)*([^.]+):\d+")


class KimiCalls(ToolCallParser):
    def __init__(self) -> None:
        super().__init__()
        self._phase: Literal["text", "section", "id", "arguments"] = "text"

    def finish(self) -> list[Piece]:
        rest, self._text = self._text, ""
        match self._phase:
            case "text":
                return joined([TextPiece(rest)])
            case "arguments":
                return joined([ArgumentsPiece(self._calls - 1, rest)])
            case _:
                return []

    def _read(self, pieces: list[Piece]) -> bool:
        """Reads up to the next mark. False when more text is needed."""
        match self._phase:
            case "text":
                text, mark = self._until(SECTION)
                pieces.append(TextPiece(text))
                self._phase = "section" if mark else "text"
            case "section":
                _, mark = self._until(CALL)
                self._phase = "id" if mark else "section"
            case "id":
                if ARGUMENTS not in self._text:
                    return False
                written, mark = self._until(ARGUMENTS)
                id_ = written.strip()
                found = _ID.fullmatch(id_)
                name, known = (found[1], id_) if found else (id_, None)
                pieces.append(CallStart(self._calls, name, known))
                self._calls += 1
                self._phase = "arguments"
            case "arguments":
                text, mark = self._until(CALL_END)
                pieces.append(ArgumentsPiece(self._calls - 1, text))
                self._phase = "section" if mark else "arguments"
        return mark

    def _until(self, mark: str) -> tuple[str, bool]:
        """Takes the text before the mark and the mark, or what is certainly before it."""
        at = self._text.find(mark)
        end = at if at >= 0 else len(self._text) - beginning_of(mark, self._text)
        taken = self._text[:end]
        self._text = self._text[end + len(mark) if at >= 0 else end :]
        return taken, at >= 0
