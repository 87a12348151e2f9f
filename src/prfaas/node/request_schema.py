"""Bodies of `POST /v1/completions` and `/v1/chat/completions`: the supported fields, and the fields
that are refused instead of ignored.

Field names and defaults are vLLM's. A field that would change the answer and is not supported is an
error; unknown fields are skipped, as in vLLM. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from prfaas.contracts.kv_transfer_params import RequestParams
from prfaas.contracts.openai import StreamOptions
from prfaas.engine.api import Sampling
from prfaas.errors import InputError
from prfaas.text import Chat, is_multimodal

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
T = TypeVar("T")
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

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
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # a chat's name for max_tokens
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
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

    @property
    def only_prompt(self) -> str | list[int]:
        """The prompt. Several in one request are refused: a gateway sends them one by one."""
        if isinstance(self.prompt, str):
            return self.prompt
        ids = [part for part in self.prompt if isinstance(part, int)]
        if len(ids) == len(self.prompt):
            return ids
        if len(self.prompt) > 1:
            raise InputError(
                f"{len(self.prompt)} prompts in one request",
                where="prompt",
                fix="send one request per prompt",
            )
        (only,) = self.prompt
        assert not isinstance(only, int)
        return only


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    asked: GenerationRequest
    chat: Chat


def parse_completion(body: bytes) -> Completion:
    """Parses and checks a completion request. InputError names the field."""
    request = _converted(_object(body, _FIXED), Completion)
    _check_stops(request)
    return request


def parse_chat(body: bytes) -> ChatCompletion:
    """Parses and checks a chat request. InputError names the field."""
    raw = _object(body, _FIXED_IN_CHAT)
    request = ChatCompletion(_converted(raw, GenerationRequest), chat_of(raw))
    _check_stops(request.asked)
    return request


def chat_of(raw: dict[str, Any]) -> Chat:
    chat = _converted(raw, Chat)
    if is_multimodal(chat.messages):
        raise InputError(
            "this node supports text only", where="messages", fix="send text parts only"
        )
    return chat


def _object(body: bytes, fixed: dict[str, tuple[object, ...]]) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InputError(f"the body is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputError("the body is not a JSON object")
    for field, served in fixed.items():
        value = raw.get(field)
        if value is not None and value not in served:
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in served)
            fix = f"leave it out, or send {allowed}" if served else "leave it out"
            raise InputError(f"{value!r} is not supported", where=field, fix=fix)
    return raw


def _converted(raw: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        raise InputError(problem, where=where.rstrip("`") or None) from None


def _check_stops(request: GenerationRequest) -> None:
    if len(request.stops) > MAX_STOPS or not all(request.stops):
        raise InputError(
            f"{len(request.stops)} stop strings",
            where="stop",
            fix=f"send at most {MAX_STOPS}, none of them empty",
        )
