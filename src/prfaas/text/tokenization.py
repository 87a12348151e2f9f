"""`POST /tokenize` and `/detokenize`, with vLLM's fields. Gateways and nodes serve the same. Pure.

A body of /tokenize has a text (`prompt`), or a conversation (`messages`) with the fields of a chat.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from prfaas.errors import InputError
from prfaas.text.chat import Chat
from prfaas.text.conversation import is_multimodal
from prfaas.text.tokenizer import ModelTokenizer

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
T = TypeVar("T")
_SHOWN_CHARS = 100  # of a field's name


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


class TokenizeRequest(msgspec.Struct, frozen=True):
    options: TokenizeOptions
    prompt: TokenizePrompt | Chat

    @property
    def model(self) -> str | None:
        return self.options.model


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PROMPT = msgspec.json.Decoder(TokenizePrompt)
_OPTIONS = msgspec.json.Decoder(TokenizeOptions)
_CHAT = msgspec.json.Decoder(Chat)
_DETOKENIZE = msgspec.json.Decoder(Detokenize)
_ANY = msgspec.json.Decoder(Any)
_OF_CHATS = (*TokenizeOptions.__struct_fields__, *Chat.__struct_fields__)
# Fields of vLLM that are accepted when they say nothing.
EMPTY_ONLY = ("chat_template", "media_io_kwargs", "mm_processor_kwargs")


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """InputError names the field."""
    fields = _decoded(_FIELDS, body)
    if "messages" in fields:
        _check_names(fields, (*_OF_CHATS, *EMPTY_ONLY))
        chat = _decoded(_CHAT, body)
        if is_multimodal(chat.messages):
            raise InputError("only text is supported", where="messages", fix="send text parts only")
        return TokenizeRequest(_decoded(_OPTIONS, body), chat)
    if "prompt" not in fields:
        raise InputError(
            "the request has no text", where="prompt", fix='send {"prompt": "..."} or messages'
        )
    _check_names(fields, TokenizePrompt.__struct_fields__)
    prompt = _decoded(_PROMPT, body)
    return TokenizeRequest(prompt, prompt)


def parse_detokenize(body: bytes) -> Detokenize:
    """InputError names the field."""
    _check_names(_decoded(_FIELDS, body), Detokenize.__struct_fields__)
    return _decoded(_DETOKENIZE, body)


def tokenize(
    tokenizer: ModelTokenizer | None, asked: TokenizeRequest, max_tokens: int
) -> TokenizeAnswer:
    """`max_tokens`: the model's context length, which does not limit the text."""
    if isinstance(asked.prompt, Chat):
        try:
            tokens = _required(tokenizer, "messages").encode_chat(asked.prompt)
        except RecursionError:
            raise InputError("nested too deeply", where="messages") from None
    else:
        tokens = _required(tokenizer, "prompt").encode(
            asked.prompt.prompt, add_special_tokens=asked.prompt.add_special_tokens
        )
    strings = None
    if asked.options.return_token_strs:
        pieces = _required(tokenizer, "prompt").pieces(tokens)
        strings = [piece or "" for piece in pieces]
    return TokenizeAnswer(len(tokens), max_tokens, tokens, strings)


def detokenize(tokenizer: ModelTokenizer | None, asked: Detokenize) -> DetokenizeAnswer:
    """With special tokens, as vLLM does."""
    known = _required(tokenizer, "tokens")
    for token, piece in zip(asked.tokens, known.pieces(asked.tokens), strict=True):
        if piece is None:
            raise InputError(
                f"{token} is not a token of this model", where="tokens", fix="leave it out"
            )
    return DetokenizeAnswer(known.decode_all(asked.tokens))


def _required(tokenizer: ModelTokenizer | None, where: str) -> ModelTokenizer:
    if tokenizer is None:
        raise InputError(
            "there is no tokenizer here",
            where=where,
            fix="configure the model's tokenizer, or ask a server that has it",
        )
    return tokenizer


def _check_names(fields: dict[str, msgspec.Raw], known: tuple[str, ...]) -> None:
    for name, value in fields.items():
        empty_only = name in EMPTY_ONLY
        if name not in known or (empty_only and _decoded(_ANY, bytes(value), name)):
            raise InputError(
                "the field is not supported", where=name[:_SHOWN_CHARS], fix="leave it out"
            )


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes, at: str = "") -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        where = ".".join(part for part in (at, path.strip("`.")) if part)
        raise InputError(problem[:1].lower() + problem[1:], where=where or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the body is not JSON: {error}", where=at or None) from None
    except RecursionError:
        raise InputError("the body is nested too deeply", where=at or None) from None
