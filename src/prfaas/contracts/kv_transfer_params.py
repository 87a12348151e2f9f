"""`kv_transfer_params`: the field of completion requests and responses that carries a hand-off.

    gateway -> prefill node   RemoteDecode    compute the prompt and send its state to a receiver
    prefill node -> gateway   ResponseParams  the state was sent, or an error
    gateway -> decode node    RemotePrefill   continue from a transfer that has been committed
    gateway -> decode node    Remainder       prefill what the node has not cached, if it is short
    checks  -> any node       Reference       compute everything here, cut as a hand-off was cut

`prfaas node` and the vLLM connector accept the same halves of a hand-off, so that a gateway does
not depend on which engine serves a node. Reports of cuts, references and remainders are of
`prfaas node` only; the connector ignores these fields. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from prfaas.contracts.openai import MAX_CHOICES
from prfaas.errors import InputError
from prfaas.types import Form, Grant, TransferId

_FIELD = "kv_transfer_params"


class RequestParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The field of a request as it travels: either half of a hand-off, a reference, or nothing."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    grant: Grant | None = None
    transfer_id: str | None = None
    handoff_tokens: int | None = None  # None: the whole prompt
    form: Form | None = None
    report_cuts: bool = False  # of either half: the response has `cut_tokens`
    do_reference: bool = False
    cut_tokens: tuple[int, ...] | None = None  # of a reference; None: as the engine cuts by itself
    do_remainder: bool = False
    max_computed_tokens: int | None = None  # of a remainder
    chunk_tokens: int | None = None  # of a remainder
    attachments: int = 1  # of a remote prefill


class RemoteDecode(msgspec.Struct, frozen=True):
    """Compute the first `handoff_tokens` tokens, send their state to the receiver of `grant`, and
    generate nothing. The receiver may also want the states at boundaries on the way."""

    grant: Grant
    handoff_tokens: int
    report_cuts: bool = False


class RemotePrefill(msgspec.Struct, frozen=True):
    """Continue from a transfer that has been committed at the node's kvd."""

    transfer_id: TransferId
    form: Form | None = None  # of the grant; None: the engine has one form
    report_cuts: bool = False
    # How often the engine will attach the transfer: once for each of `n` continuations. The first
    # attach tells the kvd, which keeps the pages until the last one is released.
    attachments: int = 1


class Reference(msgspec.Struct, frozen=True):
    """Compute the whole prompt, cut after exactly `cut_tokens` tokens, and generate. The request
    neither reads nor fills the prefix cache, because a cached state was perhaps cut otherwise. The
    response reports the cuts."""

    cut_tokens: tuple[int, ...] = ()


class Remainder(msgspec.Struct, frozen=True):
    """Resume from the longest cached prefix, and compute the rest in chunks of at most
    `chunk_tokens`, because other requests decode beside it. Refuse the request, before anything is
    computed, where the rest is more than `max_computed_tokens`."""

    max_computed_tokens: int
    chunk_tokens: int


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
    # In which the state was sent: proxies pass this object on to the decode node.
    form: Form | msgspec.UnsetType | None = msgspec.UNSET
    # The lengths at which the node has cut the prompt, the end of what it computed included. Where
    # it resumed from a prefix, the first one is the length of that prefix. Missing: not requested,
    # not known to the engine, or too many.
    cut_tokens: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


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
        if not 1 <= params.attachments <= MAX_CHOICES:
            raise InputError(
                f"{params.attachments}",
                where=f"{_FIELD}.attachments",
                fix=f"send 1 to {MAX_CHOICES}",
            )
        return RemotePrefill(
            TransferId(params.transfer_id), params.form, params.report_cuts, params.attachments
        )
    if params.do_remote_decode:
        return _remote_decode(params, prompt_tokens)
    return None


def decode_reference(params: RequestParams | None) -> Reference | None:
    """The reference that a request asks for, or None. InputError names the problem. The lengths are
    not checked: only the engine's side knows their limits (`engine.api.check_cuts`)."""
    if params is None or not params.do_reference:
        return None
    if params.do_remote_decode or params.do_remote_prefill:
        raise InputError(
            "do_reference is set together with a half of a hand-off",
            where=_FIELD,
            fix="set one of do_reference, do_remote_decode and do_remote_prefill",
        )
    return Reference(params.cut_tokens or ())


def decode_remainder(params: RequestParams | None) -> Remainder | None:
    """The remainder that a request asks for, or None. InputError names the problem."""
    if params is None or not params.do_remainder:
        return None
    if params.do_remote_decode or params.do_remote_prefill or params.do_reference:
        raise InputError(
            "do_remainder is set together with another kind",
            where=_FIELD,
            fix="set one of do_remainder, do_reference, do_remote_decode and do_remote_prefill",
        )
    for name in ("max_computed_tokens", "chunk_tokens"):
        if (getattr(params, name) or 0) < 1:
            raise InputError(
                f"{name} is missing or below 1", where=f"{_FIELD}.{name}", fix="send 1 or more"
            )
    assert params.max_computed_tokens is not None and params.chunk_tokens is not None
    return Remainder(params.max_computed_tokens, params.chunk_tokens)


def encode(params: RequestedTransfer | Reference | Remainder | ResponseParams) -> dict[str, Any]:
    """The field's value, ready for a JSON body."""
    match params:
        case RemoteDecode():
            message: msgspec.Struct = RequestParams(
                do_remote_decode=True,
                grant=params.grant,
                handoff_tokens=params.handoff_tokens,
                report_cuts=params.report_cuts,
            )
        case RemotePrefill():
            message = RequestParams(
                do_remote_prefill=True,
                transfer_id=params.transfer_id,
                form=params.form,
                report_cuts=params.report_cuts,
                attachments=params.attachments,
            )
        case Reference():
            message = RequestParams(do_reference=True, cut_tokens=params.cut_tokens)
        case Remainder():
            message = RequestParams(
                do_remainder=True,
                max_computed_tokens=params.max_computed_tokens,
                chunk_tokens=params.chunk_tokens,
            )
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
    return RemoteDecode(params.grant, tokens, params.report_cuts)
