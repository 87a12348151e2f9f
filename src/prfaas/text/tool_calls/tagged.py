"""Calls between tags, as Hermes and Qwen models write them: `<tool_call>{...}</tool_call>`.

As in vLLM, text after the first call is dropped. What stands between the tags and is not a call is
text of the answer.
"""

from __future__ import annotations

from typing import Literal

from prfaas.text.tool_calls.json_call import JsonCall
from prfaas.text.tool_calls.pieces import (
    CallStart,
    Piece,
    TextPiece,
    ToolCallParser,
    beginning_of,
    joined,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class TaggedCalls(ToolCallParser):
    def __init__(self) -> None:
        super().__init__()
        self._phase: Literal["text", "opened", "call", "closing"] = "text"
        self._call: JsonCall | None = None
        self._blank = ""  # between a tag and its call

    def finish(self) -> list[Piece]:
        rest, self._text = self._text, ""
        match self._phase:
            case "text":
                return joined(self._as_text("", rest))
            case "opened":
                return joined(self._as_text(OPEN + self._blank, rest))
            case "call":
                assert self._call is not None
                # Without a held text the call has begun, and stays unfinished.
                held = self._call.held
                return joined(self._as_text(OPEN + self._blank + held, rest)) if held else []
            case "closing":
                return []

    def _read(self, pieces: list[Piece]) -> bool:
        """Reads as much as one phase takes. False when more text is needed."""
        match self._phase:
            case "text":
                at = self._text.find(OPEN)
                end = at if at >= 0 else len(self._text) - beginning_of(OPEN, self._text)
                pieces += self._as_text("", self._text[:end])
                self._text = self._text[end + len(OPEN) if at >= 0 else end :]
                if at >= 0:
                    self._phase, self._blank = "opened", ""
                return at >= 0
            case "opened":
                body = self._text.lstrip()
                self._blank += self._text[: len(self._text) - len(body)]
                self._text = body
                if not body:
                    return False
                if body.startswith("{"):
                    self._call, self._phase = JsonCall(self._calls, "arguments"), "call"
                else:
                    pieces.append(TextPiece(OPEN + self._blank))
                    self._phase = "text"
                return True
            case "call":
                assert self._call is not None
                found, self._text = self._call.push(self._text)
                pieces += found
                self._calls += sum(isinstance(piece, CallStart) for piece in found)
                if not self._call.is_over:
                    return False
                if self._call.held:
                    pieces.append(TextPiece(OPEN + self._blank + self._call.held))
                self._phase = "text" if self._call.held else "closing"
                return True
            case "closing":
                at = self._text.find(CLOSE)
                end = at + len(CLOSE) if at >= 0 else len(self._text)
                self._text = self._text[end if at >= 0 else end - beginning_of(CLOSE, self._text) :]
                if at >= 0:
                    self._phase = "text"
                return at >= 0

    def _as_text(self, held: str, text: str) -> list[Piece]:
        """`held` may have been a call; other text counts before the first call only."""
        return [TextPiece(held + text if held or not self._calls else "")]
