"""One line of a list of requests. Pure."""

from __future__ import annotations

from prfaas.gateway.following.kept_requests import KeptRequest
from prfaas.tracing.spans import shown
from prfaas.tracing.summary import RequestSummary


def summary_of(kept: KeptRequest, to_epoch_s: float) -> RequestSummary:
    """`to_epoch_s`: the time since the epoch at 0 of the gateway's clock."""
    record, trace = kept.record, kept.record.trace
    first_s = trace.first_token_s if record.stream else None
    return RequestSummary(
        id=record.id,
        trace_id=trace.context.trace_id,
        at_s=trace.arrived_s + to_epoch_s,
        outcome=kept.outcome,
        route=record.route,
        home=trace.home,
        prefill=trace.prefill,
        decode=trace.decode,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        output_tokens=0 if record.usage is None else record.usage.completion_tokens,
        attempts=trace.attempts,
        ttft_s=None if first_s is None else first_s - trace.arrived_s,
        total_s=kept.ended_s - trace.arrived_s,
        tenant=record.tenant,
        error=shown(kept.error_text),
    )
