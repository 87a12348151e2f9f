"""`kv_transfer_params`: the half of a hand-off that a request asks for. Pure.

The fields are those of `prfaas node`, so that gateways treat both engines alike. vLLM does not
check the field. The scheduler's side answers errors instead of raising them, because an exception
in a scheduler hook would end the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prfaas.errors import InputError
from prfaas.types import Grant, TransferId


class RemoteDecode(msgspec.Struct, frozen=True):
    """Prefill here, push the state to the receiver of `grant`."""

    grant: Grant
    handoff_tokens: int


class RemotePrefill(msgspec.Struct, frozen=True):
    """Continue from a transfer that has been committed at this host's kvd."""

    transfer_id: TransferId


def parse(params: dict[str, Any] | None, prompt_tokens: int) -> RemoteDecode | RemotePrefill | None:
    """InputError says what is wrong."""
    asked = params or {}
    decode, prefill = asked.get("do_remote_decode"), asked.get("do_remote_prefill")
    if not decode and not prefill:
        return None
    if decode and prefill:
        raise InputError("both halves of a hand-off at once", where="kv_transfer_params")
    try:
        if prefill:
            return msgspec.convert(asked, RemotePrefill)
        wanted = {"handoff_tokens": prompt_tokens, **asked}
        if wanted["handoff_tokens"] is None:
            wanted["handoff_tokens"] = prompt_tokens
        parsed = msgspec.convert(wanted, RemoteDecode)
    except msgspec.ValidationError as error:
        raise InputError(str(error), where="kv_transfer_params") from None
    if not 0 < parsed.handoff_tokens <= prompt_tokens:
        raise InputError(
            f"a hand-off after {parsed.handoff_tokens} of {prompt_tokens} tokens",
            where="kv_transfer_params",
        )
    return parsed


def handed_off(request: RemoteDecode) -> dict[str, Any]:
    """What the prefill side answers: the decode side's parameters."""
    return {
        "do_remote_prefill": True,
        "transfer_id": request.grant.transfer_id,
        "handoff_tokens": request.handoff_tokens,
    }


def refused(code: str, message: str, retry_after_s: float | None = None) -> dict[str, Any]:
    """The prefill side sent nothing, or not everything. Codes are `prfaas node`'s."""
    error = {"code": code, "message": message, "retry_after_s": retry_after_s}
    return {"do_remote_prefill": False, "error": error}
