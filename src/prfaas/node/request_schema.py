"""Bodies of `POST /v1/completions` and `/v1/chat/completions`: the fields that a node serves.

Field names and defaults are vLLM's. Every other field is refused by its name, except with a value
that says nothing (`known_fields`). A body never becomes many more objects than its
prompt can have tokens: parsing holds the interpreter, and the node would seem to be silent. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np

from prfaas.contracts.kv_transfer_params import RequestParams
from prfaas.contracts.openai import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_TOTAL_CHOICES,
    StreamOptions,
    check_stops,
)
from prfaas.engine.api import MAX_BAD_WORDS, MAX_BIASES, MAX_LOGPROBS, Grammar, Sampling
from prfaas.errors import InputError
from prfaas.node.known_fields import (
    FIXED_IN_CHAT,
    FIXED_IN_COMPLETIONS,
    STREAM_OPTIONS,
    WITHOUT_EFFECT,
)
from prfaas.node.structured.fields import ResponseFormat, StructuredOutputs
from prfaas.node.structured.tool_choice import ToolChoice
from prfaas.text import Chat, is_multimodal

DEFAULT_MAX_TOKENS = 16
MAX_IDS = 1 << 20  # in a list of token ids that is not a prompt; vocabularies are smaller
MAX_WORD = 10_000  # characters
T = TypeVar("T")
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Alternatives: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_WORD)]
_Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# Brackets and commas in a body, per token that the model's context has: each of them is about a
# token of text, or stands between two token ids.
_VALUES_PER_TOKEN = 4
_MORE_VALUES = 100_000  # for the other fields
# In all prompts of a completion, even where the model's context is short.
MAX_LISTED_TOKENS = 1 << 20
_IN_NUMBERS = b"0123456789, \t\r\n"
_SHOWN_BYTES = 100  # of a value that is refused


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields common to completions and chat completions."""

    model: str | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None  # a chat's name for max_tokens
    temperature: float | None = None
    top_p: float | None = None
    seed: _Seed | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: _Limit = 0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] | None = None  # -1 and 0: every token
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[_Word], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_IDS)] | None
    ) = None
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    prompt_logprobs: _Alternatives | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    return_token_ids: bool = False
    detokenize: bool = True
    kv_transfer_params: RequestParams | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def continuous_usage(self) -> bool:
        """Every event of a stream has the usage so far."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def stops(self) -> tuple[str, ...]:
        return check_stops(self.stop)

    @property
    def continuations(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def logprobs_count(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return None

    @property
    def prompt_logprobs_count(self) -> int | None:
        """As `logprobs_count`, of the prompt's tokens."""
        return self.prompt_logprobs

    def sampling(
        self,
        default_max_tokens: int,
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> Sampling:
        """`bad_words`: the token sequences of the field of this name."""
        limits = (self.max_completion_tokens, self.max_tokens, default_max_tokens)
        allowed = self.allowed_token_ids
        return Sampling(
            max_tokens=next(limit for limit in limits if limit is not None),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=(
                1.0 if self.repetition_penalty is None else self.repetition_penalty
            ),
            logit_bias=_biases(self.logit_bias or {}),
            bad_words_token_ids=tuple(map(tuple, bad_words)),
            allowed_token_ids=None if allowed is None else frozenset(allowed),
            logprobs=self.logprobs_count,
            grammar=grammar,
        )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Values are limited to -100 to 100, as in vLLM."""
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            raise InputError(
                f"{token[:_SHOWN_BYTES]!r} is not a token id",
                where="logit_bias",
                fix="use token ids as keys",
            )
    return {int(token): min(100.0, max(-100.0, bias)) for token, bias in given.items()}


class Completion(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[TokenId | str | list[TokenId]]  # a text, token ids, or a list of either
    add_special_tokens: bool = True
    echo: bool | None = None
    logprobs: _Alternatives | None = None

    @property
    def logprobs_count(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_count(self) -> int | None:
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs


class ChatOptions(GenerationRequest, frozen=True, kw_only=True):
    """The fields of a chat besides those of `Chat`."""

    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def logprobs_count(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


@dataclass(frozen=True, slots=True)
class TextCompletion:
    asked: Completion  # without its prompt
    prompts: list[str] | list[array[int]]


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    asked: ChatOptions
    chat: Chat


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_COMPLETION = msgspec.json.Decoder(Completion)
_CHAT_OPTIONS = msgspec.json.Decoder(ChatOptions)
_CHAT = msgspec.json.Decoder(Chat)
_ANY = msgspec.json.Decoder()
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_OF_COMPLETIONS = frozenset(Completion.__struct_fields__)
_OF_CHATS = frozenset({*ChatOptions.__struct_fields__, *Chat.__struct_fields__})


def check_values(body: bytes, max_tokens: int, listed_tokens: int = 0) -> None:
    """Raises InputError when the body has more JSON values than a prompt of `max_tokens` tokens can
    need, or prompts of `listed_tokens` together. Counts in numpy, which does not hold the
    interpreter."""
    read = np.frombuffer(body, dtype=np.uint8)
    values = sum(int(np.count_nonzero(read == ord(mark))) for mark in "[{,")
    limit = max(_VALUES_PER_TOKEN * max_tokens, listed_tokens) + _MORE_VALUES
    if values > limit:
        raise InputError(
            f"the body has more than {limit} brackets and commas, and the model's context has "
            f"{max_tokens} tokens",
            fix="send a shorter prompt, or fewer prompts",
        )


def parse_completion(body: bytes) -> TextCompletion:
    """Parses and checks a completion request. InputError names the field."""
    fields = _fields(body)
    _check_fields(fields, _OF_COMPLETIONS, FIXED_IN_COMPLETIONS)
    ids = _token_ids(fields["prompt"]) if "prompt" in fields else None
    if ids is not None:
        asked = _decoded(_COMPLETION, msgspec.json.encode({**fields, "prompt": ""}))
        prompts: list[str] | list[array[int]] = ids
    else:
        asked = _decoded(_COMPLETION, body)
        prompts = _prompts(asked.prompt)
    check_stops(asked.stop)
    _check_choices(asked, len(prompts))
    return TextCompletion(asked, prompts)


def _token_ids(prompt: msgspec.Raw) -> list[array[int]] | None:
    """The prompts of a flat list, or of a list of such lists, without an object per token: a first
    token waits for the ids of a long prompt. None for anything else, and for an empty list."""
    text = bytes(prompt)
    marks = text.translate(None, _IN_NUMBERS)
    if marks == b"[]":
        ids = _flat_ids(text)
        return None if ids is None else [ids]
    count = len(marks) // 2 - 1
    if not 0 < count <= MAX_PROMPTS or marks != b"[" + count * b"[]" + b"]":
        return None
    found = [_flat_ids(bytes(one)) for one in _decoded(_LIST, text)]
    listed = [ids for ids in found if ids is not None]
    return listed if len(listed) == len(found) else None


def _flat_ids(text: bytes) -> array[int] | None:
    """`text` is JSON of digits, commas, spaces and at most two brackets."""
    if text[:1] != b"[" or not text[1:-1].strip():
        return None
    numbers = np.fromstring(text[1:-1], dtype=np.uint64, sep=",")
    if numbers.max() >= 2**32:
        return None
    return array("I", numbers.astype(np.uint32).tobytes())


def _prompts(
    prompt: str | list[TokenId | str | list[TokenId]],
) -> list[str] | list[array[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        return [array("I")]
    if len(prompt) > MAX_PROMPTS:
        raise InputError(
            f"{len(prompt)} prompts", where="prompt", fix=f"send at most {MAX_PROMPTS}"
        )
    texts = [one for one in prompt if isinstance(one, str)]
    lists = [array("I", one) for one in prompt if isinstance(one, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise InputError(
            "the prompts are not of one kind",
            where="prompt",
            fix="send texts, or token ids, or lists of token ids",
        )
    return texts or lists


def _check_choices(asked: GenerationRequest, prompts: int) -> None:
    if asked.continuations * prompts > MAX_TOTAL_CHOICES:
        raise InputError(
            f"{asked.continuations} continuations of {prompts} prompts",
            where="n",
            fix=f"send at most {MAX_TOTAL_CHOICES} of both together",
        )
    if asked.continuations > 1 and asked.temperature == 0.0:
        raise InputError(
            f"{asked.continuations} greedy continuations would be equal",
            where="n",
            fix="send 1, or a temperature above 0",
        )
    if asked.stream and asked.prompt_logprobs:
        raise InputError(
            "a stream does not have log-probabilities of the prompt",
            where="prompt_logprobs",
            fix="send stream: false, or echo and logprobs",
        )
    params = asked.kv_transfer_params
    if params is None:
        return
    if prompts > 1:
        raise InputError(
            f"{prompts} prompts with kv_transfer_params",
            where="prompt",
            fix="send one request per prompt",
        )
    if params.do_remote_decode and asked.continuations > 1:
        raise InputError(
            "a prefill has no continuations", where="n", fix="send 1 with do_remote_decode"
        )
    halves = params.do_remote_decode or params.do_remote_prefill or params.do_remainder
    if halves and asked.prompt_logprobs_count is not None:
        raise InputError(
            "log-probabilities of the prompt need the whole prompt computed here",
            where="prompt_logprobs",
            fix="send it without kv_transfer_params",
        )


def parse_chat(body: bytes) -> ChatCompletion:
    """Parses and checks a chat request. InputError names the field."""
    _check_fields(_fields(body), _OF_CHATS, FIXED_IN_CHAT)
    request = ChatCompletion(_decoded(_CHAT_OPTIONS, body), _chat(body))
    check_stops(request.asked.stop)
    _check_choices(request.asked, 1)
    if request.asked.top_logprobs and not request.asked.logprobs:
        raise InputError(
            "top_logprobs requires logprobs", where="top_logprobs", fix="send logprobs: true"
        )
    return request


def _chat(body: bytes) -> Chat:
    chat = _decoded(_CHAT, body)
    if is_multimodal(chat.messages):
        raise InputError(
            "this node supports text only", where="messages", fix="send text parts only"
        )
    return chat


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        str(body, "utf-8")  # msgspec does not look into the fields that it skips
    except UnicodeDecodeError as error:
        raise InputError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    return _decoded(_OBJECT, body)


def _check_fields(
    fields: Mapping[str, msgspec.Raw],
    served: frozenset[str],
    fixed: Mapping[str, tuple[object, ...]],
) -> None:
    """Raises InputError for a field that is not served."""
    _check_fixed(fields, fixed)
    _check_known(fields, served | fixed.keys() | WITHOUT_EFFECT)
    options = fields.get("stream_options")
    if options is not None and bytes(options).lstrip().startswith(b"{"):
        given = _decoded(_OBJECT, bytes(options), "stream_options")
        _check_fixed(given, STREAM_OPTIONS, "stream_options.")
        known = STREAM_OPTIONS.keys() | set(StreamOptions.__struct_fields__)
        _check_known(given, known, "stream_options.")


def _check_known(fields: Mapping[str, msgspec.Raw], known: Set[str], inside: str = "") -> None:
    for field in fields:
        if field not in known:
            raise InputError(
                "the field is not supported",
                where=f"{inside}{field[:_SHOWN_BYTES]}",
                fix="leave it out",
            )


def _check_fixed(
    fields: Mapping[str, msgspec.Raw], fixed: Mapping[str, tuple[object, ...]], inside: str = ""
) -> None:
    for field in fixed.keys() & fields.keys():
        served, where = fixed[field], f"{inside}{field}"
        value = _decoded(_ANY, bytes(fields[field]), where)
        if value is not None and not any(_is_equal(value, one) for one in served):
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in served)
            fix = f"leave it out, or send {allowed}" if served else "leave it out"
            shown = bytes(fields[field])[:_SHOWN_BYTES].decode(errors="replace")
            raise InputError(f"{shown} is not supported", where=where, fix=fix)


def _is_equal(value: object, served: object) -> bool:
    """As in JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(served, bool) and value == served


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes, at: str = "") -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        where = ".".join(part for part in (at, path.strip("`.")) if part)
        raise InputError(problem, where=where or None) from None
    except msgspec.DecodeError as error:
        raise InputError(f"the body is not JSON: {error}", where=at or None) from None
    except RecursionError:
        raise InputError("the body is nested too deeply", where=at or None) from None
