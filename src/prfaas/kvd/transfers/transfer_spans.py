"""The span of a transfer at the kvd that receives it, or at the one that sends it."""

from __future__ import annotations

from prfaas.tracing.context import parse_traceparent
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.spans import FORM, NBYTES, TRANSFER_ID, Value
from prfaas.types import Form, Grant


def record_transfer(
    recorder: SpanRecorder,
    name: str,
    grant: Grant,
    began_s: float,
    *,
    nbytes: int,
    form: Form,
    error: str = "",
) -> None:
    """Records that the transfer has ended now. A grant without a trace is not recorded."""
    parent = parse_traceparent(grant.traceparent)
    if parent is not None:
        attributes = transfer_attributes(grant, nbytes, form)
        recorder.record(name, parent, began_s, error=error, attributes=attributes)


def transfer_attributes(grant: Grant, nbytes: int, form: Form | None = None) -> dict[str, Value]:
    """`form`: None: that of the grant."""
    return {TRANSFER_ID: grant.transfer_id, NBYTES: nbytes, FORM: form or grant.form}
