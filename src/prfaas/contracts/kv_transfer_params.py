"""`kv_transfer_params`: the field of completion requests and responses that carries a hand-off.

    gateway -> prefill node   RemoteDecode    compute the prompt and send its state to a receiver
    prefill node -> gateway   ResponseParams  the state was sent, or an error
    gateway -> decode node    RemotePrefill   continue from a transfer that has been committed

`prfaas node` and the vLLM connector accept the same requests, so that a gateway does not depend on
which engine serves a node. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from prfaas.errors import InputError
from prfaas.types import Grant, TransferId

_FIELD = "kv_transfer_params"


class RequestParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The field of a request as it travels: either half of a hand-off, or neither."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    grant: Grant | None = None
    transfer_id: str | None = None
    handoff_tokens: int | None = None  # None: the whole prompt


class RemoteDecode(msgspec.Struct, frozen=True):
    """Compute the first `handoff_tokens` tokens, send their state to the receiver of `grant`, and
    generate nothing. The receiver may also want the states at boundaries on the way."""

    grant: Grant
    handoff_tokens: int


class RemotePrefill(msgspec.Struct, frozen=True):
    """Continue from a transfer that has been committed at the node's kvd."""

    transfer_id: TransferId


RequestedTransfer: TypeAlias = RemoteDecode | RemotePrefill


class PrefillError(msgspec.Struct, frozen=True):
    """Why a prefill sent nothing, or not everything. The codes are those of `prfaas node`."""

    code: str = ""
    message: str | None = None
    retry_after_s: float | None = None


class ResponseParams(msgspec.Struct, frozen=True):
    """The field of a prefill's response. vLLM refuses a prefill with HTTP 200 and an `error` here;
    `prfaas node` refuses with an HTTP status."""

    do_remote_prefill: bool | msgspec.UnsetType = msgspec.UNSET
    transfer_id: str | msgspec.UnsetType | None = msgspec.UNSET
    handoff_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    error: PrefillError | msgspec.UnsetType | None = msgspec.UNSET


def decode(
    params: RequestParams | Mapping[str, Any] | None, prompt_tokens: int
) -> RequestedTransfer | None:
    """The half of a hand-off that a request asks for, or None. InputError names the problem.

    Without a `do_remote_*` flag, other fields are ignored: vLLM passes the field on unchecked.
    """
    if params is None:
        return None
    if not isinstance(params, RequestParams):
        if not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
            return None
        try:
            params = msgspec.convert(params, RequestParams)
        except msgspec.ValidationError as error:
            raise InputError(str(error), where=_FIELD) from None
    if params.do_remote_decode and params.do_remote_prefill:
        raise InputError(
            "do_remote_decode and do_remote_prefill are both set", where=_FIELD, fix="set one"
        )
    if params.do_remote_prefill:
        if not params.transfer_id:
            raise InputError("transfer_id is missing", where=_FIELD, fix="send the grant's id")
        return RemotePrefill(TransferId(params.transfer_id))
    if params.do_remote_decode:
        return _remote_decode(params, prompt_tokens)
    return None


def encode(params: RequestedTransfer | ResponseParams) -> dict[str, Any]:
    """The field's value, ready for a JSON body."""
    match params:
        case RemoteDecode():
            message: msgspec.Struct = RequestParams(
                do_remote_decode=True, grant=params.grant, handoff_tokens=params.handoff_tokens
            )
        case RemotePrefill():
            message = RequestParams(do_remote_prefill=True, transfer_id=params.transfer_id)
        case ResponseParams():
            message = params
    built: dict[str, Any] = msgspec.to_builtins(message)
    return built


def prefill_error(code: str, message: str, retry_after_s: float | None = None) -> ResponseParams:
    error = PrefillError(code, message, retry_after_s)
    return ResponseParams(do_remote_prefill=False, error=error)


def _remote_decode(params: RequestParams, prompt_tokens: int) -> RemoteDecode:
    if params.grant is None:
        raise InputError(
            "grant is missing", where=_FIELD, fix="request one from the decode node's kvd"
        )
    tokens = prompt_tokens if params.handoff_tokens is None else params.handoff_tokens
    if not 0 < tokens <= prompt_tokens:
        raise InputError(
            f"handoff_tokens is {tokens}, the prompt has {prompt_tokens} tokens",
            where=_FIELD,
            fix=f"send 1 to {prompt_tokens}, or leave it out",
        )
    return RemoteDecode(params.grant, tokens)
