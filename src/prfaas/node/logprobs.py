"""The `logprobs` objects of completions and chats, as vLLM's responses have them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from prfaas.engine.api import Token

_LEAST = -9999.0  # instead of minus infinity, which JSON does not have
_CONTEXT_TOKENS = 4  # a character in UTF-8 has at most four bytes


class TokenEntry(NamedTuple):
    text: str
    logprob: float
    # The chosen token, then the likeliest others, of which vLLM shows a part.
    ranked: tuple[tuple[str, float], ...]


class LogprobsReader:
    """Makes the entries of one answer."""

    def __init__(self, text_of: Callable[[int, Sequence[int]], str], count: int) -> None:
        """`text_of` gets a token and the tokens before it. `count`: alternatives per token."""
        self._text_of = text_of
        self.count = count

    def entry(self, token: Token, generated: Sequence[int]) -> TokenEntry:
        """`generated`: the tokens of the answer before this one."""
        assert token.logprobs is not None
        context = generated[-_CONTEXT_TOKENS:]
        values = {token.id: token.logprobs.chosen} | {
            other: value for other, value in token.logprobs.top if other != token.id
        }
        ranked = tuple(
            (self._text_of(other, context), max(value, _LEAST)) for other, value in values.items()
        )
        text, logprob = ranked[0]
        return TokenEntry(text, logprob, ranked[: self.count + 1])


def token_id_text(token: int, context: Sequence[int]) -> str:
    """For `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def completion_logprobs(entries: Sequence[TokenEntry], offset: int, count: int) -> dict[str, Any]:
    """`offset`: characters of the tokens before the first entry."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [entry.text for entry in entries],
        "top_logprobs": [dict(entry.ranked) for entry in entries],
    }


def chat_logprobs(entries: Sequence[TokenEntry], offset: int, count: int) -> dict[str, Any]:
    """As vLLM does, the chosen token counts as one of the `count` alternatives."""
    return {
        "content": [
            {
                **_chat_token(entry.text, entry.logprob),
                "top_logprobs": [_chat_token(*one) for one in entry.ranked[:count]],
            }
            for entry in entries
        ]
    }


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
