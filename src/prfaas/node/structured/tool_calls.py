"""The tool calls of one answer, whole or in pieces, in OpenAI's form."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from prfaas.node.structured.tool_choice import ToolUse
from prfaas.text.tool_calls import ArgumentsPiece, CallStart, Piece, TextPiece


class ToolCallReader:
    """Reads an answer's text as it becomes final. A caller takes either the message, at the end, or
    all deltas."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = use.form.parser(use.functions)
        self._pieces: list[Piece] = []  # since the last delta
        self._called = False

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls, so that "tool_calls" is the reason of the end. As in OpenAI's
        API, a call that the request has named is not a reason."""
        return self._called and not self._use.is_named

    def read(self, text: str, *, is_end: bool) -> bool:
        """Whether there is something to send."""
        found = self._parser.push(text)
        if is_end:
            found += self._parser.finish()
        self._pieces += (piece for piece in found if self._is_wanted(piece))
        self._called = self._called or any(isinstance(piece, CallStart) for piece in found)
        return bool(self._pieces)

    def _is_wanted(self, piece: Piece) -> bool:
        return isinstance(piece, TextPiece) or piece.index == 0 or self._use.parallel

    def delta(self) -> dict[str, Any]:
        """What was read since the last one."""
        pieces, self._pieces = self._pieces, []
        text, calls = _contents(pieces)
        return {
            **({"content": text} if text else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def message(self) -> dict[str, Any]:
        """The whole answer."""
        text, calls = _contents(self._pieces)
        if not calls:
            return {"role": "assistant", "content": text}
        for call in calls:
            del call["index"]
        content = text or ("" if self._use.is_forced else None)
        return {"role": "assistant", "content": content, "tool_calls": calls}


def _contents(pieces: Iterable[Piece]) -> tuple[str, list[dict[str, Any]]]:
    """The text, and an entry for each call that begins or continues."""
    text, calls = "", dict[int, dict[str, Any]]()
    for piece in pieces:
        match piece:
            case TextPiece():
                text += piece.text
            case CallStart(index, name, id_):
                calls[index] = {
                    "index": index,
                    "id": id_ or f"chatcmpl-tool-{secrets.token_hex(16)}",  # as vLLM's
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ArgumentsPiece(index, more):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += more
    return text, list(calls.values())
