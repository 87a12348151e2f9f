"""Bodies of `POST /tokenize` and `/detokenize`, as in vLLM. A body of /tokenize with `messages` is a
conversation, whose other fields are those of a chat. Pure."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class TokenizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both kinds of /tokenize."""

    model: str | None = None
    return_token_strs: bool | None = None


class TokenizePrompt(TokenizeOptions, frozen=True, kw_only=True):
    prompt: str
    add_special_tokens: bool = True


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str
