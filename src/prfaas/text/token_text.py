"""The text of one token, for log-probabilities. Pure.

A token decoded alone may lack what it has in a text: its leading space, or the rest of a character.
This follows vLLM: a token that ends inside a character has no text, and the token that completes
the character has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.text.detokenizer import UNFINISHED, Decode

_SPACE = "▁"  # what SentencePiece writes for a space; byte-level vocabularies do not have it


def token_text(decode: Decode, token: int, piece: str, context: Sequence[int]) -> str:
    """`piece` is the token in the vocabulary, `context` the tokens before it, at least four where
    there are."""
    alone = decode([token])
    if alone.endswith(UNFINISHED):
        return _completed(decode, token, context)
    missing = len(piece) - len(piece.lstrip(_SPACE)) - (len(alone) - len(alone.lstrip(" ")))
    return " " * max(0, missing) + alone


def _completed(decode: Decode, token: int, context: Sequence[int]) -> str:
    for count in range(1, len(context) + 1):
        before = list(context[len(context) - count :])
        text = decode([*before, token])
        if text.endswith(UNFINISHED):
            continue
        # The text of tokens that ended inside the character belongs to this token.
        while before and decode(before[-1:]).endswith(UNFINISHED):
            before.pop()
        return text[len(decode(before)) :]
    return ""
