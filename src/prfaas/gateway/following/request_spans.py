"""The gateway's spans of one request, made from its record. Pure.

    request
    ├── read body, tokenize
    ├── wait for a node, back off
    └── attempt             one for each attempt, and for each prompt of a list
        ├── grant, copy prefixes, prefill, wait for commit
        └── decode

Spans of calls have the ids that were sent with the calls. The ids of the others follow from those,
so that a request has the same spans whenever it is looked up, and at the collector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prfaas.gateway.attempt_trace import MOST_WAITS, AttemptTrace, Call, Wait
from prfaas.gateway.following.kept_requests import IN_PROGRESS, KeptRequest
from prfaas.gateway.request import RequestTrace
from prfaas.scheduler.request import Route
from prfaas.tracing import spans as names
from prfaas.tracing.spans import Kind, Span, Value, shown

MOST_SPANS: Final = 512  # of one request: a list has many prompts
_SHORTEST_BACK_OFF_S = 0.001
_FINE = frozenset({"completed", "cancelled", "rejected", IN_PROGRESS})


def request_spans(kept: KeptRequest, model: str, to_epoch_s: float) -> list[Span]:
    """In order of their starts, parents before their children. `to_epoch_s`: the time since the
    epoch at 0 of the gateway's clock."""
    maker = _Maker(kept, model, to_epoch_s)
    found = [maker.request(), *maker.body()]
    for prompt in kept.record.each_prompt:
        if len(found) >= MOST_SPANS:
            break
        found += maker.attempts(prompt.trace)
    found.sort(key=lambda span: span.start_s)  # stable: a parent stays before its children
    return found[:MOST_SPANS]


def route_name(route: Route) -> str:
    if route.offloaded:
        return "remote"
    return "alone" if route.alone else "local"


class _Maker:
    def __init__(self, kept: KeptRequest, model: str, to_epoch_s: float) -> None:
        self._kept = kept
        self._model = model
        self._to_epoch_s = to_epoch_s
        self._trace = kept.record.trace

    def request(self) -> Span:
        record, trace = self._kept.record, self._trace
        attributes: dict[str, Value] = {
            names.REQUEST_ID: record.id,
            names.MODEL: self._model,
            names.OUTCOME: self._kept.outcome,
            names.ROUTE: record.route,
            names.HOME: trace.home,
            names.INPUT_TOKENS: record.prompt_tokens,
            names.CACHED_TOKENS: trace.cached_tokens,
            names.ATTEMPTS: trace.attempts,
        }
        if record.usage is not None:
            attributes[names.OUTPUT_TOKENS] = record.usage.completion_tokens
        if trace.first_token_s is not None and record.stream:
            attributes[names.TTFT] = trace.first_token_s - trace.arrived_s
        lost = sum(prompt.trace.stateless_tokens for prompt in record.each_prompt)
        if lost:
            attributes[names.STATELESS_TOKENS] = lost
        failed = self._kept.outcome not in _FINE
        return self._span(
            names.REQUEST,
            trace.context.span_id,
            trace.parent_id,
            trace.arrived_s,
            self._kept.ended_s,
            attributes,
            kind="server",
            error=(self._kept.error_text or self._kept.outcome) if failed else "",
        )

    def body(self) -> Iterator[Span]:
        """Reading and tokenising."""
        trace, own = self._trace, self._trace.context.span_id
        read_s = self._until(trace.read_s)
        yield self._span(names.READ, _derived(own, 1), own, trace.arrived_s, read_s)
        if trace.read_s is not None:
            tokenized_s = self._until(trace.tokenized_s)
            yield self._span(names.TOKENIZE, _derived(own, 2), own, read_s, tokenized_s)

    def attempts(self, trace: RequestTrace) -> Iterator[Span]:
        """The attempts of one prompt, and the waits before them."""
        parent, ended_s = trace.context.span_id, None
        for course in trace.courses:
            yield from self._wait(parent, course, ended_s)
            yield from self._attempt(parent, course, trace)
            ended_s = course.ended_s
        if trace.asked_s is not None:  # it waits, or has ended while it waited
            base = trace.courses[-1].span_id if trace.courses else parent
            if ended_s is not None:
                yield from self._back_off(_derived(base, 5), parent, ended_s, trace.asked_s)
            # The numbers 8 to 15 of the last attempt are those of its own waits.
            ids = [_derived(base, number) for number in (4, *range(16, 16 + MOST_WAITS))]
            yield from self._waits(
                ids, parent, trace.asked_s, trace.waits, self._kept.ended_s, self._kept.error_text
            )

    def _wait(self, parent: str, course: AttemptTrace, ended_s: float | None) -> Iterator[Span]:
        """`ended_s`: when the attempt before has ended."""
        own = course.span_id
        if ended_s is not None:
            yield from self._back_off(_derived(own, 2), parent, ended_s, course.asked_s)
        ids = [_derived(own, number) for number in (1, *range(8, 8 + MOST_WAITS))]
        yield from self._waits(ids, parent, course.asked_s, course.waits, course.routed_s)

    def _waits(
        self,
        ids: Sequence[str],
        parent: str,
        asked_s: float,
        waits: Sequence[Wait],
        end_s: float,
        error: str = "",
    ) -> Iterator[Span]:
        """One span for each thing that the request was held for, or one without a reason where it
        was not held. The last one has the error."""
        starts = [asked_s, *(wait.at_s for wait in waits[1:])]
        ends = [*starts[1:], end_s]
        for number, (start_s, until_s) in enumerate(zip(starts, ends, strict=True)):
            attributes: dict[str, Value] = {}
            if waits:
                attributes[names.REASON] = shown(waits[number].reason)
                if waits[number].cluster:
                    attributes[names.CLUSTER] = waits[number].cluster
            found = error if number == len(starts) - 1 else ""
            yield self._span(
                names.WAIT, ids[number], parent, start_s, until_s, attributes, error=found
            )

    def _back_off(
        self, span_id: str, parent: str, ended_s: float, asked_s: float
    ) -> Iterator[Span]:
        if asked_s - ended_s > _SHORTEST_BACK_OFF_S:
            yield self._span(names.BACK_OFF, span_id, parent, ended_s, asked_s)

    def _attempt(self, parent: str, course: AttemptTrace, trace: RequestTrace) -> Iterator[Span]:
        route, own = course.route, course.span_id
        end_s = self._until(course.ended_s)
        is_last = course is trace.course
        attributes: dict[str, Value] = {
            names.ROUTE: route_name(route),
            names.REASON: shown(route.reason),
            names.CLUSTER: route.cluster,
            names.CACHED_TOKENS: trace.cached_tokens if is_last else route.cached_tokens,
        }
        if course.failure_kind:
            attributes[names.FAILURE] = course.failure_kind
        yield self._span(
            names.ATTEMPT, own, parent, course.routed_s, end_s, attributes, error=course.failure
        )
        if course.grant is not None:
            to_decode: dict[str, Value] = {names.TARGET: route.decode}
            if course.transfer_id:
                to_decode[names.TRANSFER_ID] = course.transfer_id
            yield self._call(names.GRANT, course.grant, course, to_decode)
        if course.copies is not None:
            copied: dict[str, Value] = {
                names.TARGET: shown(", ".join(sorted({copy.target for copy in route.copies}))),
                names.NBYTES: sum(copy.nbytes for copy in route.copies),
                names.PREDICTED: max(copy.seconds for copy in route.copies),
            }
            yield self._call(names.COPIES, course.copies, course, copied, kind="internal")
        if course.prefill is not None:
            to_prefill: dict[str, Value] = {
                names.TARGET: route.prefill,
                names.CLUSTER: route.cluster,
                names.PREDICTED: route.prefill_s,
            }
            yield self._call(names.PREFILL, course.prefill, course, to_prefill)
        if course.grant is not None and course.grant.answered_s is not None:
            yield self._commit(course, course.grant.answered_s, trace.form if is_last else "")
        if course.decode is not None:
            yield self._decode(course, course.decode)

    def _commit(self, course: AttemptTrace, granted_s: float, form: str) -> Span:
        route = course.route
        attributes: dict[str, Value] = {
            names.TARGET: route.decode,
            names.TRANSFER_ID: course.transfer_id,
            names.NBYTES: route.nbytes,
        }
        if form:
            attributes[names.FORM] = form
        if course.transfer_s is not None:
            attributes[names.PREDICTED] = course.transfer_s
        end_s, error = course.committed_s, ""
        if end_s is None:
            end_s, error = self._until(course.ended_s), course.failure
        own = course.span_id
        return self._span(
            names.COMMIT, _derived(own, 3), own, granted_s, end_s, attributes, error=error
        )

    def _decode(self, course: AttemptTrace, call: Call) -> Span:
        """Until the answer has ended."""
        attributes: dict[str, Value] = {names.TARGET: course.route.decode}
        if course.prefill is None and course.route.prefill == course.route.decode:
            attributes[names.PREDICTED] = course.route.prefill_s
        if call.answered_s is not None and self._kept.record.stream:
            attributes[names.TTFT] = call.answered_s - call.sent_s
        end_s = self._until(course.ended_s)
        own, parent = call.span_id, course.span_id
        error = course.failure
        if self._kept.outcome == "broken" and not error:
            error = self._kept.error_text
        return self._span(
            names.DECODE, own, parent, call.sent_s, end_s, attributes, kind="client", error=error
        )

    def _call(
        self,
        name: str,
        call: Call,
        course: AttemptTrace,
        attributes: dict[str, Value],
        kind: Kind = "client",
    ) -> Span:
        """A call that was not answered ends with its attempt, and has its failure. The state of a
        prefill may be committed before the prefill's answer is here."""
        end_s, error = call.answered_s, ""
        if end_s is None and name == names.PREFILL:
            end_s = course.committed_s
        if end_s is None:
            end_s, error = self._until(course.ended_s), course.failure
        own, parent = call.span_id, course.span_id
        return self._span(name, own, parent, call.sent_s, end_s, attributes, kind=kind, error=error)

    def _until(self, time_s: float | None) -> float:
        return self._kept.ended_s if time_s is None else time_s

    def _span(
        self,
        name: str,
        span_id: str,
        parent_id: str | None,
        start_s: float,
        end_s: float,
        attributes: dict[str, Value] | None = None,
        *,
        kind: Kind = "internal",
        error: str = "",
    ) -> Span:
        return Span(
            name=name,
            trace_id=self._trace.context.trace_id,
            span_id=span_id,
            start_s=start_s + self._to_epoch_s,
            end_s=max(start_s, end_s) + self._to_epoch_s,
            service="gateway",
            parent_id=parent_id,
            kind=kind,
            error=shown(error) if error else "",
            attributes=attributes or {},
        )


def _derived(span_id: str, number: int) -> str:
    """An id of a span that was sent to no other process."""
    return f"{(int(span_id, 16) + number) % (1 << 64) or 1:016x}"
