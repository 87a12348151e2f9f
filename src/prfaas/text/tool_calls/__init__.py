"""Tool calls in the text of an answer: which form a model's chat template has, the parsers of the
forms, and grammars that force a call. Pure, and independent of requests and engines.

    template ──► find_form ──► ToolForm ──► parser: text, piece by piece ──► text and calls
                                       └──► grammar: a call that must be made
"""

from prfaas.text.tool_calls.forms import ToolForm, find_form
from prfaas.text.tool_calls.pieces import (
    ArgumentsPiece,
    CallStart,
    Piece,
    TextPiece,
    ToolCallParser,
)

__all__ = [
    "ArgumentsPiece",
    "CallStart",
    "Piece",
    "TextPiece",
    "ToolCallParser",
    "ToolForm",
    "find_form",
]
