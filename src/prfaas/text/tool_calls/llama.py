"""Calls of Llama 3: the whole answer is `{"name": "f", "parameters": {...}}`, perhaps after
`<|python_tag|>`, and several are separated by semicolons. An answer that begins otherwise is text.
As in vLLM, text after the first call is dropped.
"""

from __future__ import annotations

from typing import Literal

from prfaas.text.tool_calls.json_call import JsonCall
from prfaas.text.tool_calls.pieces import CallStart, Piece, TextPiece, ToolCallParser, joined

TAG = "<|python_tag|>"


class LlamaCalls(ToolCallParser):
    def __init__(self) -> None:
        super().__init__()
        self._phase: Literal["start", "call", "between", "text", "over"] = "start"
        self._before = ""  # of the first call
        self._call: JsonCall | None = None

    def finish(self) -> list[Piece]:
        rest, self._text = self._text, ""
        if self._phase == "start":
            return joined([TextPiece(rest)])
        if self._phase == "call" and not self._calls:
            assert self._call is not None
            return joined([TextPiece(self._before + self._call.held)])
        return []

    def _read(self, pieces: list[Piece]) -> bool:
        """Reads as much as one phase takes. False when more text is needed."""
        match self._phase:
            case "start":
                body = self._text.lstrip()
                if body.startswith(TAG):
                    body = body[len(TAG) :].lstrip()
                if not body or TAG.startswith(body):
                    return False
                self._before = self._text[: len(self._text) - len(body)]
                if body.startswith("{"):
                    self._text = body
                    self._begin()
                else:
                    self._phase = "text"
                return True
            case "call":
                assert self._call is not None
                found, self._text = self._call.push(self._text)
                pieces += found
                self._calls += sum(isinstance(piece, CallStart) for piece in found)
                if not self._call.is_over:
                    return False
                self._phase = "between"
                if self._call.held:  # not a call
                    self._phase = "over" if self._calls else "text"
                    if not self._calls:
                        pieces.append(TextPiece(self._before + self._call.held))
                return True
            case "between":
                self._text = self._text.lstrip("; \t\r\n")
                if not self._text:
                    return False
                if self._text.startswith("{"):
                    self._begin()
                else:
                    self._phase = "over"
                return True
            case "text":
                pieces.append(TextPiece(self._text))
                self._text = ""
                return False
            case "over":
                self._text = ""
                return False

    def _begin(self) -> None:
        self._call, self._phase = JsonCall(self._calls, "arguments|parameters"), "call"
