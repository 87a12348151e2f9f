"""The `logprobs` objects of completions and chats, as vLLM's responses have them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prfaas.engine.api import PromptLogprobs, Token

_LEAST = -9999.0  # instead of minus infinity, which JSON does not have
_CONTEXT_TOKENS = 4  # a character in UTF-8 has at most four bytes


class TokenEntry(NamedTuple):
    text: str
    logprob: float | None  # None: nothing precedes the token
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
        return self._ranked(values, context)

    def prompt_entries(
        self, prompt: Sequence[int], found: PromptLogprobs
    ) -> tuple[TokenEntry, ...]:
        """Of the prompt's tokens, as if they were a part of the answer (`echo`)."""
        first = TokenEntry(self._text_of(prompt[0], ()), None, ())
        return (first, *(self._ranked(*one) for one in _positions(prompt, found)))

    def _ranked(self, values: Mapping[int, float], context: Sequence[int]) -> TokenEntry:
        """`values`: the chosen token first."""
        ranked = tuple(
            (self._text_of(other, context), max(value, _LEAST)) for other, value in values.items()
        )
        text, logprob = ranked[0]
        return TokenEntry(text, logprob, ranked[: self.count + 1])


def _positions(
    prompt: Sequence[int], found: PromptLogprobs
) -> Iterator[tuple[dict[int, float], Sequence[int]]]:
    """Log-probabilities of each token of the prompt but the first, the token itself before its
    alternatives; and the tokens before it."""
    rows = zip(found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist(), strict=True)
    for place, (chosen, ids, values) in enumerate(rows, start=1):
        others = dict(zip(ids, values, strict=True))
        context = prompt[max(0, place - _CONTEXT_TOKENS) : place]
        yield {prompt[place]: chosen} | others, context


def prompt_logprobs(
    prompt: Sequence[int],
    found: PromptLogprobs,
    text_of: Callable[[int, Sequence[int]], str] | None,
) -> list[dict[str, Any] | None]:
    """The field `prompt_logprobs` of a response. Without `text_of` it has no texts."""
    listed: list[dict[str, Any] | None] = [None]
    ranks = found.ranks.tolist()
    for rank, top, (values, context) in zip(
        ranks, found.top_ids.tolist(), _positions(prompt, found), strict=True
    ):
        of_top = {token: place for place, token in enumerate(top, start=1)}
        listed.append(
            {
                str(token): {
                    "logprob": max(value, _LEAST),
                    "rank": of_top.get(token, rank),
                    "decoded_token": text_of(token, context) if text_of is not None else None,
                }
                for token, value in values.items()
            }
        )
    return listed


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
        "top_logprobs": [dict(entry.ranked) or None for entry in entries],
    }


def chat_logprobs(entries: Sequence[TokenEntry], offset: int, count: int) -> dict[str, Any]:
    """As vLLM does, the chosen token counts as one of the `count` alternatives."""
    return {
        "content": [
            {
                **_chat_token(*entry.ranked[0]),
                "top_logprobs": [_chat_token(*one) for one in entry.ranked[:count]],
            }
            for entry in entries
        ]
    }


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
