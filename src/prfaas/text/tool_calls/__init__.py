"""Tool calls in the text of an answer: which form a model's chat template has, the parsers of the
forms, and grammars that calls follow. Pure, and independent of requests and engines.

    template ──► find_form ──► ToolForm ──► parser: text, piece by piece ──► text and calls
                                       └──► grammar of its calls
"""

from prfaas.text.tool_calls.forms import ToolForm, Wanted, find_form
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
    "Wanted",
    "find_form",
]
