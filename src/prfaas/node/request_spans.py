"""The spans of one request below its server span: what each of its choices has waited for.

    lease ──► queue ──► prefill ──► (first token) decode ──► (last token)

The times are those of `ActiveRequest`. A choice that fails ends in the step that it was in.
"""

from __future__ import annotations

from typing import NamedTuple

from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill
from prfaas.engine.api import Event, Finished, JobFailed
from prfaas.node.choices import StartRequest
from prfaas.node.job_builder import TokenizedRequest
from prfaas.node.request_runner import ActiveRequest, EmitEvent
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.server_span import DISCONNECTED, ServerSpan
from prfaas.tracing.spans import (
    CACHED_TOKENS,
    INPUT_TOKENS,
    NODE_DECODE,
    NODE_LEASE,
    NODE_PREFILL,
    NODE_QUEUE,
    OUTPUT_TOKENS,
    TRANSFER_ID,
    TTFT,
    Value,
)

# Of one request that have spans: a process keeps a bounded number of spans for a trace.
TRACED_CHOICES = 8


class Step(NamedTuple):
    name: str
    start_s: float
    end_s: float
    error: str


class RequestSpans:
    """Starts the choices of one request, as `start` does, and records the spans of the first ones
    when they have ended. `span` is the request's own. Use it on the event loop of the runner."""

    def __init__(self, start: StartRequest, recorder: SpanRecorder, span: ServerSpan) -> None:
        self._start = start
        self._recorder = recorder
        self._span = span
        self._choices: list[ActiveRequest] = []

    def start(
        self, request: TokenizedRequest, emit: EmitEvent, *, is_part: bool = False
    ) -> ActiveRequest:
        if self._span.context is None or len(self._choices) >= TRACED_CHOICES:
            return self._start(request, emit, is_part=is_part)

        def emit_and_record(event: Event) -> None:
            if isinstance(event, Finished | JobFailed):
                self._record(active, event)
            emit(event)

        active = self._start(request, emit_and_record, is_part=is_part)
        self._choices.append(active)
        return active

    def describe(self) -> None:
        """Adds to the request's own span what its choices have so far."""
        if not self._choices:
            return
        first, attributes = self._choices[0], self._span.attributes
        attributes.update(_transfer(first.request))
        attributes[INPUT_TOKENS] = len(first.request.prompt)
        attributes[CACHED_TOKENS] = first.resumed_tokens
        attributes[OUTPUT_TOKENS] = sum(len(choice.generated) for choice in self._choices)
        if first.first_token_s is not None:
            attributes[TTFT] = first.first_token_s - first.arrived_s

    def _record(self, active: ActiveRequest, ending: Finished | JobFailed) -> None:
        assert self._span.context is not None
        error = _problem(active, ending)
        self._span.error = self._span.error or error
        for step in steps(active, self._recorder.now(), error):
            attributes: dict[str, Value] = {}
            if step.name == NODE_LEASE:
                attributes.update(_transfer(active.request))
            elif step.name == NODE_PREFILL:
                attributes[INPUT_TOKENS] = len(active.request.prompt)
                attributes[CACHED_TOKENS] = active.resumed_tokens
            elif step.name == NODE_DECODE:
                attributes[OUTPUT_TOKENS] = len(active.generated)
            self._recorder.record(
                step.name,
                self._span.context,
                step.start_s,
                step.end_s,
                error=step.error,
                attributes=attributes,
            )


def steps(active: ActiveRequest, now_s: float, error: str = "") -> list[Step]:
    """Of a choice that has ended now, in their order. The last one has the error."""
    named = (
        (NODE_LEASE, active.arrived_s, active.leased_s),
        (NODE_QUEUE, active.leased_s, active.began_s),
        (NODE_PREFILL, active.began_s, active.computed_s),
        (NODE_DECODE, active.first_token_s, active.last_token_s),
    )
    found = [
        Step(name, start_s, now_s if end_s is None else end_s, "")
        for name, start_s, end_s in named
        if start_s is not None
    ]
    if active.computed_s is not None and active.began_s is None:
        # The pool had all state of a hand-off: the engine has not seen the request.
        found = [step for step in found if step.name != NODE_QUEUE]
    return [*found[:-1], found[-1]._replace(error=error)]


def _problem(active: ActiveRequest, ending: Finished | JobFailed) -> str:
    if isinstance(ending, Finished) or active.ended_by == "stop":
        return ""
    return DISCONNECTED if active.ended_by == "abort" else str(ending.error)


def _transfer(request: TokenizedRequest) -> dict[str, Value]:
    match request.transfer:
        case RemoteDecode():
            return {TRANSFER_ID: request.transfer.grant.transfer_id}
        case RemotePrefill():
            return {TRANSFER_ID: request.transfer.transfer_id}
        case _:
            return {}
