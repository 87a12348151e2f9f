"""Bodies of `POST /v1/completions` and `/v1/chat/completions`: the supported fields, and the fields
that are refused instead of ignored.

Field names and defaults are vLLM's. A field that would change the answer and is not supported is an
error; unknown fields are skipped, as in vLLM. A body never becomes many more objects than its
prompt can have tokens: parsing holds the interpreter, and the node would seem to be silent. Pure.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np

from prfaas.contracts.kv_transfer_params import RequestParams
from prfaas.contracts.openai import StreamOptions
from prfaas.engine.api import Sampling
from prfaas.errors import InputError
from prfaas.text import Chat, is_multimodal

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
T = TypeVar("T")
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# Brackets and commas in a body, per token that the model's context has: each of them is about a
# token of text, or stands between two token ids.
_VALUES_PER_TOKEN = 4
_MORE_VALUES = 100_000  # for the other fields
_IN_NUMBERS = b"0123456789, \t\r\n"
_SHOWN_BYTES = 100  # of a value that is refused

# Supported with these values only.
_FIXED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}
_FIXED_IN_CHAT: dict[str, tuple[object, ...]] = _FIXED | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": (
        "auto",
        "none",
    ),  # calls cannot be forced
    "chat_template": (),
}


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields common to completions and chat completions."""

    model: str | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None  # a chat's name for max_tokens
    temperature: float | None = None
    top_p: float | None = None
    seed: _Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    return_token_ids: bool = False
    detokenize: bool = True
    kv_transfer_params: RequestParams | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stops)

    def sampling(self, default_max_tokens: int) -> Sampling:
        limits = (self.max_completion_tokens, self.max_tokens, default_max_tokens)
        return Sampling(
            max_tokens=next(limit for limit in limits if limit is not None),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )


class Completion(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[TokenId | str | list[TokenId]]  # token ids, or a list of one prompt
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TextCompletion:
    asked: Completion  # without its prompt
    prompt: str | array[int]


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    asked: GenerationRequest
    chat: Chat


class TokenizePrompt(msgspec.Struct, frozen=True):
    """`POST /tokenize` with a text; with `messages` the body is that of a chat."""

    prompt: str
    add_special_tokens: bool = True


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_COMPLETION = msgspec.json.Decoder(Completion)
_GENERATION = msgspec.json.Decoder(GenerationRequest)
_CHAT = msgspec.json.Decoder(Chat)
_TOKENIZE = msgspec.json.Decoder(TokenizePrompt)
_ANY = msgspec.json.Decoder()


def check_values(body: bytes, max_tokens: int) -> None:
    """Raises InputError when the body has more JSON values than a prompt of `max_tokens` tokens can
    need. Counts in numpy, which does not hold the interpreter."""
    read = np.frombuffer(body, dtype=np.uint8)
    values = sum(int(np.count_nonzero(read == ord(mark))) for mark in "[{,")
    limit = _VALUES_PER_TOKEN * max_tokens + _MORE_VALUES
    if values > limit:
        raise InputError(
            f"the body has more than {limit} brackets and commas, and the model's context has "
            f"{max_tokens} tokens",
            fix="send a shorter prompt",
        )


def parse_completion(body: bytes) -> TextCompletion:
    """Parses and checks a completion request. InputError names the field."""
    fields = _fields(body)
    _check_fixed(fields, _FIXED)
    ids = _token_ids(fields["prompt"]) if "prompt" in fields else None
    if ids is not None:
        asked = _decoded(_COMPLETION, msgspec.json.encode({**fields, "prompt": ""}))
        prompt: str | array[int] = ids
    else:
        asked = _decoded(_COMPLETION, body)
        prompt = _only_prompt(asked.prompt)
    _check_stops(asked)
    return TextCompletion(asked, prompt)


def _token_ids(prompt: msgspec.Raw) -> array[int] | None:
    """Of a flat list, without an object per token: a first token waits for the ids of a long
    prompt. None for anything else."""
    text = bytes(prompt)
    if text.translate(None, _IN_NUMBERS) != b"[]" or not text[1:-1].strip():
        return None
    # What is JSON and has these characters only, is a list of whole numbers.
    numbers = np.fromstring(text[1:-1], dtype=np.uint64, sep=",")
    if numbers.max() >= 2**32:
        return None
    return array("I", numbers.astype(np.uint32).tobytes())


def _only_prompt(prompt: str | list[TokenId | str | list[TokenId]]) -> str | array[int]:
    """Several in one request are refused: a gateway sends them one by one."""
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        return array("I")
    if len(prompt) > 1:
        raise InputError(
            f"{len(prompt)} prompts in one request",
            where="prompt",
            fix="send one request per prompt",
        )
    (only,) = prompt
    assert not isinstance(only, int)
    return only if isinstance(only, str) else array("I", only)


def parse_chat(body: bytes) -> ChatCompletion:
    """Parses and checks a chat request. InputError names the field."""
    _check_fixed(_fields(body), _FIXED_IN_CHAT)
    request = ChatCompletion(_decoded(_GENERATION, body), _chat(body))
    _check_stops(request.asked)
    return request


def parse_tokenize(body: bytes) -> TokenizePrompt | Chat:
    """Parses and checks the body of /tokenize. InputError names the field."""
    fields = _fields(body)
    if "messages" in fields:
        return _chat(body)
    if "prompt" not in fields:
        raise InputError(
            "the request has no text", where="prompt", fix='send {"prompt": "..."} or messages'
        )
    return _decoded(_TOKENIZE, body)


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


def _check_fixed(fields: dict[str, msgspec.Raw], fixed: dict[str, tuple[object, ...]]) -> None:
    for field, served in fixed.items():
        if field not in fields:
            continue
        value = _decoded(_ANY, bytes(fields[field]), field)
        if value is not None and not any(_is_equal(value, one) for one in served):
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in served)
            fix = f"leave it out, or send {allowed}" if served else "leave it out"
            shown = bytes(fields[field])[:_SHOWN_BYTES].decode(errors="replace")
            raise InputError(f"{shown} is not supported", where=field, fix=fix)


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
    except UnicodeDecodeError as error:
        raise InputError(f"the body is not UTF-8: {error.reason}", where=at or None) from None
    except RecursionError:
        raise InputError("the body is nested too deeply", where=at or None) from None


def _check_stops(request: GenerationRequest) -> None:
    if len(request.stops) > MAX_STOPS or not all(request.stops):
        raise InputError(
            f"{len(request.stops)} stop strings",
            where="stop",
            fix=f"send at most {MAX_STOPS}, none of them empty",
        )
