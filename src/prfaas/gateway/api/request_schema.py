"""Request bodies: the fields that the gateway checks before it routes a request. All other fields
reach the decode engine unchanged, as the bytes that the client sent. Pure.

A long prompt of token ids is parsed once, as one array. A body never becomes many more objects than
its prompt can have tokens. Cheap checks come first: the number of values, the model's name, refused
fields and the size of the other fields, before the prompt is parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from prfaas.contracts.openai import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_TOTAL_CHOICES,
    StreamOptions,
    check_stops,
)
from prfaas.contracts.openai_fields import REFUSED_BY_GATEWAY
from prfaas.errors import InputError, RequestError
from prfaas.gateway.client.request_body import JsonParts
from prfaas.gateway.client.token_ids import LIMIT, TokenIds
from prfaas.schema import prepare
from prfaas.text import Chat

Body: TypeAlias = bytes | memoryview
Kind: TypeAlias = Literal["completion", "chat", "either"]
Path: TypeAlias = Literal["/v1/completions", "/v1/chat/completions"]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=LIMIT)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
Ids: TypeAlias = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]
One: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1)]
T = TypeVar("T")
_SHOWN_CHARS = 64  # of a field's name, and of a model's


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of completions and of chats; ranges are vLLM's."""

    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None

    @property
    def limit_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def shows_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionOptions(Options, frozen=True, kw_only=True):
    best_of: One | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatOptions(Options, frozen=True, kw_only=True):
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def limit_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Prompt(msgspec.Struct, frozen=True):
    prompt: Text | Ids


class _PromptField(msgspec.Struct, frozen=True):
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MODEL = msgspec.json.Decoder(str | None)
_PROMPT = msgspec.json.Decoder(Prompt)
_PROMPT_FIELD = msgspec.json.Decoder(_PromptField)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_LISTED = msgspec.json.Decoder(Text | Ids)
_COMPLETION = msgspec.json.Decoder(CompletionOptions)
_CHAT_OPTIONS = msgspec.json.Decoder(ChatOptions)
_CHAT = msgspec.json.Decoder(Chat)
_STREAM_OPTIONS = msgspec.json.Decoder(dict[str, Any])
# The fields of a conversation: the chat template reads them, and they may be as long as a prompt.
_CONVERSATION = ("messages", "tools", "documents")
_MAX_FIELD_BYTES = 1 << 20  # of all other fields together
_MAX_FIELDS = 1000  # the engines know fewer than a hundred
# Brackets and commas in a body, per token that the model's context has: each of them is about a
# token of text, or stands between two token ids.
_VALUES_PER_TOKEN = 4
_MORE_VALUES = 100_000  # for the other fields
_DIGITS_AND_SPACE = b"0123456789 \n\r\t"
_COUNTED_BYTES = 1 << 20  # of a body at once: the count stops soon after its limit
prepare(CompletionOptions, ChatOptions, Chat)  # large bodies are parsed in threads


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    path: Path
    options: Options
    prompts: tuple[str | TokenIds | Chat, ...]  # a chat is the only one
    fields: dict[str, Any]  # as sent to the decode engine
    prompt_logprobs: bool = False
    add_special_tokens: bool = True


def parse(kind: Kind, body: Body, model: str | None = None) -> ParsedRequest:
    """The request that the body describes. `either` is a chat when the body has messages, else a
    completion. Raises `InputError`, which names the field, and `RequestError` with status 404 when
    the request is not for `model`; None accepts every model."""
    raw = _parsed(_OBJECT, body)
    if model is not None and "model" in raw:
        asked = _parsed(_MODEL, raw["model"], "model")
        if asked is not None and asked != model:
            raise no_such_model(asked, model)
    if kind == "chat" or (kind == "either" and "messages" in raw):
        return _chat(raw, body)
    return _completion(raw, body)


def parse_completion(body: Body) -> ParsedRequest:
    return parse("completion", body)


def parse_chat(body: Body) -> ParsedRequest:
    return parse("chat", body)


def parse_either(body: Body) -> ParsedRequest:
    return parse("either", body)


def no_such_model(name: str, served: str) -> RequestError:
    shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
    return RequestError(
        404, "model_not_found", f"the model {shown!r} is not served; {served!r} is", param="model"
    )


def check_values(body: Body, max_tokens: int) -> None:
    """Raises InputError when the body has more JSON values than a prompt of `max_tokens` tokens can
    need. Of a list of prompts of ids, each may have so many: it becomes one array."""
    array = np.frombuffer(body, dtype=np.uint8)
    each = limit = _VALUES_PER_TOKEN * max_tokens + _MORE_VALUES
    values = 0
    for begin in range(0, len(array), _COUNTED_BYTES):
        part = array[begin : begin + _COUNTED_BYTES]
        values += sum(int(np.count_nonzero(part == ord(mark))) for mark in "[{,")
        if values > limit == each:
            limit = each * _count_prompts(body)
        if values > limit:
            raise InputError(
                f"the body has more than {limit} brackets and commas, and the model's context has "
                f"{max_tokens} tokens",
                fix="send a shorter prompt",
            )


def _completion(raw: dict[str, msgspec.Raw], body: Body) -> ParsedRequest:
    fields = _checked_fields(raw, ("prompt",))
    options = _parsed(_COMPLETION, msgspec.json.encode(fields))
    check_stops(options.stop)
    prompts = _prompts(raw.get("prompt"), body)
    if len(prompts) * (options.n or 1) > MAX_TOTAL_CHOICES:
        raise InputError(
            f"{len(prompts)} prompts with {options.n} choices each are more than "
            f"{MAX_TOTAL_CHOICES} choices",
            where="n",
            fix="send fewer prompts in one request, or a smaller n",
        )
    return ParsedRequest(
        "/v1/completions",
        options,
        prompts,
        _engine_fields(fields, options),
        prompt_logprobs=options.prompt_logprobs is not None
        or bool(options.echo and options.logprobs is not None),
        add_special_tokens=options.add_special_tokens,
    )


def _chat(raw: dict[str, msgspec.Raw], body: Body) -> ParsedRequest:
    fields = _checked_fields(raw, _CONVERSATION)
    options = _parsed(_CHAT_OPTIONS, msgspec.json.encode(fields))
    check_stops(options.stop)
    forwarded = _engine_fields(fields, options)
    for name in _CONVERSATION:
        if name in raw:
            forwarded[name] = JsonParts(memoryview(raw[name]))
    return ParsedRequest(
        "/v1/chat/completions",
        options,
        (_parsed(_CHAT, body),),
        forwarded,
        prompt_logprobs=options.prompt_logprobs is not None,
    )


def _prompts(raw: msgspec.Raw | None, body: Body) -> tuple[str | TokenIds, ...]:
    if raw is not None and _is_list_of_prompts(raw):
        several = _parsed(_LIST, raw, "prompt")
        if len(several) > MAX_PROMPTS:
            raise InputError(
                f"{len(several)} prompts in one request",
                where="prompt",
                fix=f"send at most {MAX_PROMPTS} prompts per request",
            )
        return tuple(_listed(one, f"prompt[{index}]") for index, one in enumerate(several))
    ids = TokenIds.read(bytes(raw)) if raw is not None else None
    return (_text_or_ids(_parsed(_PROMPT, body).prompt) if ids is None else ids,)


def _is_list_of_prompts(raw: msgspec.Raw) -> bool:
    """A list whose first item is not a number. Its other items are checked one by one."""
    text = memoryview(raw)
    return bytes(text[:1]) == b"[" and bytes(text[1:_SHOWN_CHARS]).lstrip()[:1] in (b"[", b'"')


def _listed(raw: msgspec.Raw, at: str) -> str | TokenIds:
    ids = TokenIds.read(bytes(raw))
    return ids if ids is not None else _text_or_ids(_parsed(_LISTED, raw, at))


def _count_prompts(body: Body) -> int:
    """The prompts of a list of lists of ids, which is not parsed here; 1 for any other body, and
    for a list of more prompts than a request may have."""
    try:
        raw = bytes(_parsed(_PROMPT_FIELD, body).prompt)
    except InputError:
        return 1
    shape = raw.translate(None, _DIGITS_AND_SPACE)  # such as [[,,],[,]]
    has_numbers = b"],," in shape or shape.endswith(b"],]")
    if not shape.startswith(b"[[") or has_numbers or shape.strip(b"[],"):
        return 1
    prompts = shape.count(b"[") - 1
    return prompts if prompts <= MAX_PROMPTS else 1


def _text_or_ids(prompt: str | list[int]) -> str | TokenIds:
    return prompt if isinstance(prompt, str) else TokenIds.of(prompt)


def _checked_fields(raw: dict[str, msgspec.Raw], long: tuple[str, ...]) -> dict[str, msgspec.Raw]:
    """All fields but the `long` ones, which are parsed separately. They stay bytes, copied so that
    they do not keep the whole body in memory."""
    if len(raw) > _MAX_FIELDS:
        raise InputError(
            f"the body has {len(raw)} fields, more than {_MAX_FIELDS}",
            fix="leave out the fields that the engine does not know",
        )
    for name, reason in REFUSED_BY_GATEWAY.items():
        if name in raw and bytes(memoryview(raw[name])[:5]) != b"null":
            raise InputError(reason, where=name, fix="leave it out")
    _check_size(raw, long)
    fields = {name: value.copy() for name, value in raw.items() if name not in long}
    for name, value in fields.items():
        _check_text(bytes(value), name)
    return fields


def _check_size(raw: dict[str, msgspec.Raw], long: tuple[str, ...]) -> None:
    sizes = {name: len(memoryview(value)) for name, value in raw.items() if name not in long}
    nbytes = sum(sizes.values()) + sum(map(len, sizes))
    if nbytes > _MAX_FIELD_BYTES:
        largest = max(sizes, key=lambda name: sizes[name] + len(name))
        raise InputError(
            f"the fields beside {' and '.join(long)} have {nbytes} bytes, more than "
            f"{_MAX_FIELD_BYTES}",
            where=largest[:_SHOWN_CHARS],
            fix="shorten it",
        )


def _check_text(value: bytes, name: str) -> None:
    """The engine would refuse it, after the prefill."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason}", where=name[:_SHOWN_CHARS]) from None


def _engine_fields(fields: dict[str, msgspec.Raw], options: Options) -> dict[str, Any]:
    """The fields for the decode engine. A stream always requests usage; the gateway sets the salt
    separately."""
    forwarded: dict[str, Any] = {
        name: value
        for name, value in fields.items()
        if name not in ("cache_salt", *REFUSED_BY_GATEWAY)
    }
    if options.stream:
        given = fields.get("stream_options", msgspec.Raw(b"null"))
        known = {} if bytes(given) == b"null" else _parsed(_STREAM_OPTIONS, given, "stream_options")
        if not options.shows_usage:
            # It counts with include_usage only, which the client has not sent.
            known.pop("continuous_usage_stats", None)
        forwarded["stream_options"] = {**known, "include_usage": True}
    elif options.stream_options is not None:
        raise InputError(
            "requires stream=true",
            where="stream_options",
            fix="set stream, or leave it out",
        )
    return forwarded


def _parsed(decoder: msgspec.json.Decoder[T], data: Body | msgspec.Raw, at: str = "") -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _named(error, at) from None
    except msgspec.DecodeError as error:
        raise InputError(f"not JSON: {error}", where=at or None) from None
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason}", where=at or None) from None
    except RecursionError:
        raise InputError("nested too deeply", where=at or None) from None


def _named(error: msgspec.ValidationError, at: str = "") -> InputError:
    problem, _, path = str(error).partition(" - at `$")
    where = ".".join(part for part in (at, path.strip("`.")) if part)
    return InputError(problem[:1].lower() + problem[1:], where=where or None)
