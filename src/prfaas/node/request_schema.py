"""Bodies of `POST /v1/completions` and `/v1/chat/completions`: what is understood, and what is
refused instead of ignored.

Field names and defaults are vLLM's. A field that would change the answer and is not served here is
an error; fields that nobody knows are skipped, as vLLM does. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from prfaas.contracts.openai import StreamOptions
from prfaas.engine.api import Sampling
from prfaas.errors import InputError
from prfaas.text import Chat, is_multimodal
from prfaas.types import Grant, TransferId

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
T = TypeVar("T")
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

# Served at these values only.
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
    "tool_choice": ("auto", "none"),  # tools are described to the model; nothing forces a call
    "chat_template": (),
}


class TransferParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params`: either half of a hand-off."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    grant: Grant | None = None
    handoff_tokens: int | None = None
    transfer_id: str | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What requests of both kinds have in common."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # of a chat: another name for it
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
    kv_transfer_params: TransferParams | None = None

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


class Completion(Generation, frozen=True, kw_only=True):
    prompt: str | list[TokenId | str | list[TokenId]]  # ids; or a list of one of either kind
    add_special_tokens: bool = True

    @property
    def only_prompt(self) -> str | list[int]:
        """The prompt; several in one request are refused: a gateway sends them one by one."""
        if isinstance(self.prompt, str):
            return self.prompt
        ids = [part for part in self.prompt if isinstance(part, int)]
        if len(ids) == len(self.prompt):
            return ids
        if len(self.prompt) > 1:
            raise InputError(
                f"{len(self.prompt)} prompts in one request", where="prompt", fix="send one each"
            )
        (only,) = self.prompt
        assert not isinstance(only, int)
        return only


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    asked: Generation
    chat: Chat


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """Prefill here, push the state to the receiver of `grant` (and what it wants of boundaries on
    the way), generate nothing."""

    grant: Grant
    handoff_tokens: int


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """Continue from a transfer that has been committed here."""

    transfer_id: TransferId


Transfer: TypeAlias = RemoteDecode | RemotePrefill | None


def parse_completion(body: bytes) -> Completion:
    """InputError names the field."""
    request = _converted(_object(body, _FIXED), Completion)
    _check_stops(request)
    return request


def parse_chat(body: bytes) -> ChatCompletion:
    """InputError names the field."""
    raw = _object(body, _FIXED_IN_CHAT)
    request = ChatCompletion(_converted(raw, Generation), chat_of(raw))
    _check_stops(request.asked)
    return request


def chat_of(raw: dict[str, Any]) -> Chat:
    chat = _converted(raw, Chat)
    if is_multimodal(chat.messages):
        raise InputError("this node reads text only", where="messages", fix="leave the rest out")
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
            raise InputError(f"{value!r} is not served", where=field, fix=fix)
    return raw


def _converted(raw: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        raise InputError(problem, where=where.rstrip("`") or None) from None


def _check_stops(request: Generation) -> None:
    if len(request.stops) > MAX_STOPS or not all(request.stops):
        raise InputError(
            f"{len(request.stops)} stop strings",
            where="stop",
            fix=f"give up to {MAX_STOPS}, none of them empty",
        )


def transfer_of(request: Generation, prompt_tokens: int) -> Transfer:
    """Which half of a hand-off this is, if any."""
    params = request.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return None
    if params.do_remote_decode and params.do_remote_prefill:
        raise _bad_transfer("both halves of a hand-off at once", "set one of the do_remote_* flags")
    if params.do_remote_prefill:
        if not params.transfer_id:
            raise _bad_transfer("no transfer_id", "send the id of the grant")
        return RemotePrefill(TransferId(params.transfer_id))
    if params.grant is None:
        raise _bad_transfer("no grant", "ask the decode side's kvd for one first")
    tokens = prompt_tokens if params.handoff_tokens is None else params.handoff_tokens
    if not 0 < tokens <= prompt_tokens:
        raise _bad_transfer(
            f"a hand-off after {tokens} of {prompt_tokens} tokens",
            "handoff_tokens must lie within the prompt",
        )
    return RemoteDecode(params.grant, tokens)


def _bad_transfer(problem: str, fix: str) -> InputError:
    return InputError(problem, where="kv_transfer_params", fix=fix)
