"""Grants for transfers: a transfer's id, and the token that authorises its sender."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence

from prfaas.errors import InputError
from prfaas.types import CANONICAL, Form, Grant, TransferId


def new_grant(
    data_address: str,
    *,
    max_bytes: int,
    deadline_s: float,
    skip_tokens: Mapping[str, int] | None = None,
    checkpoint_tokens: Sequence[int] = (),
    transfer_id: TransferId | None = None,
    form: Form = CANONICAL,
    traceparent: str | None = None,
    tenant: str = "",
) -> Grant:
    """Makes a grant with a new secret token, and with a new id unless the caller has one."""
    return Grant(
        transfer_id=new_transfer_id() if transfer_id is None else transfer_id,
        token=secrets.token_urlsafe(32),
        data_address=data_address,
        skip_tokens=dict(skip_tokens or {}),
        max_bytes=max_bytes,
        deadline_s=deadline_s,
        checkpoint_tokens=tuple(checkpoint_tokens),
        form=form,
        traceparent=traceparent,
        tenant=tenant,
    )


def new_transfer_id() -> TransferId:
    return TransferId(str(uuid.uuid4()))


def is_transfer_id(text: str) -> bool:
    """Whether the text is a UUID in its usual form (lower case, with hyphens). The other forms of
    a UUID are not ids, because two spellings would be one transfer on the wire."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def transfer_key(transfer_id: TransferId) -> bytes:
    """The 16 bytes that identify the transfer on the wire."""
    try:
        return uuid.UUID(transfer_id).bytes
    except ValueError:
        raise InputError(f"{transfer_id!r} is not a transfer id", fix="use a UUID") from None
