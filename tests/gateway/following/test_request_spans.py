"""The gateway's spans of a request, from its record."""

from __future__ import annotations

import msgspec

from prfaas.gateway.api.metrics import PromptRecord
from prfaas.gateway.attempt_trace import MOST_WAITS, Wait, begin_call
from prfaas.gateway.following.export import Observers, RequestExport
from prfaas.gateway.following.kept_requests import IN_PROGRESS, KeptRequest
from prfaas.gateway.following.request_spans import MOST_SPANS, request_spans
from prfaas.gateway.request import MOST_COURSES, RequestTrace
from prfaas.tracing import spans as names
from prfaas.tracing.spans import Span
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.following.builders import (
    EPOCH_S,
    TRACE_ID,
    copy,
    hand_off,
    kept,
    record,
    route,
    trace,
)

PARENT = "00-" + "cd" * 16 + "-" + "ef" * 8 + "-00"


def spans_of(request: KeptRequest) -> list[Span]:
    found = request_spans(request, "m", EPOCH_S)
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[Span]) == found
    known: set[str] = set()
    for span in found:
        assert span.span_id not in known, "ids are unique"
        assert span.parent_id is None or span.parent_id in known or span.name == names.REQUEST
        known.add(span.span_id)
        assert span.trace_id == request.record.trace.context.trace_id
        assert span.end_s >= span.start_s >= EPOCH_S
    starts = [span.start_s for span in found]
    assert starts == sorted(starts)
    assert found == request_spans(request, "m", EPOCH_S), "the same spans every time"
    return found


def named(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def lies(span: Span) -> tuple[float, float]:
    return round(span.start_s - EPOCH_S, 6), round(span.end_s - EPOCH_S, 6)


def test_every_step_of_a_hand_off_has_a_span() -> None:
    made = trace(10.0, home="pd")
    course = hand_off(made, 10.5, route())
    assert course.decode is not None and course.grant is not None and course.prefill is not None
    made.first_token_s = course.decode.answered_s = 15.5
    made.stateless_tokens = 128
    spans = spans_of(kept(made, 20.0))
    assert [(span.name, lies(span)) for span in spans] == [
        (names.REQUEST, (10.0, 20.0)),
        (names.READ, (10.0, 10.1)),
        (names.TOKENIZE, (10.1, 10.3)),
        (names.WAIT, (10.5, 11.5)),
        (names.ATTEMPT, (11.5, 20.0)),
        (names.GRANT, (11.5, 11.6)),
        (names.PREFILL, (11.6, 14.6)),
        (names.COMMIT, (11.6, 15.0)),
        (names.DECODE, (15.1, 20.0)),
    ]
    request, attempt = named(spans, names.REQUEST), named(spans, names.ATTEMPT)
    assert (request.kind, request.parent_id, request.error) == ("server", None, "")
    assert request.attributes == {
        names.REQUEST_ID: "r",
        names.MODEL: "m",
        names.OUTCOME: "completed",
        names.ROUTE: "remote",
        names.HOME: "pd",
        names.INPUT_TOKENS: 1000,
        names.OUTPUT_TOKENS: 7,
        names.CACHED_TOKENS: 64,
        names.ATTEMPTS: 1,
        names.TTFT: 5.5,
        names.STATELESS_TOKENS: 128,
    }
    for name, call, target in (
        (names.GRANT, course.grant, "home1"),
        (names.PREFILL, course.prefill, "far0"),
        (names.DECODE, course.decode, "home1"),
    ):
        span = named(spans, name)
        assert (span.span_id, span.kind) == (call.span_id, "client"), "as it was sent"
        assert span.parent_id == attempt.span_id == course.span_id
        assert span.attributes[names.TARGET] == target
    assert named(spans, names.WAIT).attributes == {
        names.REASON: "the queue is full",
        names.CLUSTER: "far",
    }
    assert named(spans, names.PREFILL).attributes[names.PREDICTED] == 2.0
    commit = named(spans, names.COMMIT).attributes
    assert (commit[names.PREDICTED], commit[names.NBYTES], commit[names.FORM]) == (
        *(0.25, 5000),
        "canonical",
    )
    assert not any(span.error for span in spans)


def test_a_failed_attempt_keeps_its_times_and_its_failure() -> None:
    made = trace(10.0)
    first = made.begin_attempt(route(), 11.0)
    first.grant = begin_call(made.context, 11.0)
    first.grant.answered_s = 11.1
    first.prefill = begin_call(made.context, 11.1)
    first.fail("far0: the connection was lost", names.LOST, 13.0)
    made.asked_s = 13.5
    second = made.begin_attempt(route("home0", offloaded=False), 13.5)
    second.decode = begin_call(made.context, 13.6)
    made.first_token_s = 14.0
    spans = spans_of(kept(made, 16.0))
    failed, succeeded = [span for span in spans if span.name == names.ATTEMPT]
    assert lies(failed) == (11.0, 13.0) and lies(succeeded) == (13.5, 16.0)
    assert failed.error == "far0: the connection was lost"
    assert failed.attributes[names.FAILURE] == names.LOST
    assert (failed.attributes[names.ROUTE], succeeded.attributes[names.ROUTE]) == (
        *("remote", "local"),
    )
    assert lies(named(spans, names.BACK_OFF)) == (13.0, 13.5)
    prefill, commit = named(spans, names.PREFILL), named(spans, names.COMMIT)
    assert lies(prefill) == (11.1, 13.0) and lies(commit) == (11.1, 13.0)
    assert prefill.error == commit.error == failed.error
    assert not named(spans, names.GRANT).error and not succeeded.error


def test_a_prefill_whose_answer_is_late_ends_with_the_commit() -> None:
    made = trace(10.0)
    course = hand_off(made, 10.5, route())
    assert course.prefill is not None
    course.prefill.answered_s = None
    prefill = named(spans_of(kept(made, 20.0)), names.PREFILL)
    assert lies(prefill) == (11.6, 15.0) and not prefill.error


def test_copies_of_prefixes() -> None:
    made = trace(10.0)
    course = hand_off(made, 10.5, route(copies=(copy(0.5), copy(0.2))))
    course.copies = begin_call(made.context, 11.6)
    course.copies.answered_s = 12.0
    span = named(spans_of(kept(made, 20.0)), names.COPIES)
    assert lies(span) == (11.6, 12.0) and span.span_id == course.copies.span_id
    assert span.attributes == {names.TARGET: "far0", names.NBYTES: 1400, names.PREDICTED: 0.5}


def test_one_node_that_prefills_and_decodes_has_the_prediction() -> None:
    made = trace(10.0)
    course = made.begin_attempt(route("home1", "home1"), 11.0)
    course.decode = begin_call(made.context, 11.0)
    decode = named(spans_of(kept(made, 20.0)), names.DECODE)
    assert decode.attributes == {names.TARGET: "home1", names.PREDICTED: 2.0}


def test_a_request_that_no_node_took_has_waited_to_its_end() -> None:
    made = trace(10.0)
    made.asked_s = 10.5
    spans = spans_of(kept(made, 70.5, "shed", "no node could take the request"))
    wait = named(spans, names.WAIT)
    assert lies(wait) == (10.5, 70.5) and wait.error == "no node could take the request"
    assert spans[0].error == wait.error
    made.begin_attempt(route(), 71.0).fail("x", names.OTHER, 72.0)
    made.asked_s = 72.5
    waits = [s for s in spans_of(kept(made, 80.0, "shed", "busy")) if s.name == names.WAIT]
    assert [lies(span) for span in waits] == [(10.5, 71.0), (72.5, 80.0)]


def test_each_thing_that_a_request_is_held_for_has_a_span() -> None:
    made = trace(10.0)
    made.asked_s = 10.5
    made.waits += [Wait(10.5, "the queues are long", "far"), Wait(12.0, "no node decodes", "")]
    spans = spans_of(kept(made, 70.5, "shed", "refused"))
    busy, lost = [span for span in spans if span.name == names.WAIT]
    assert lies(busy) == (10.5, 12.0) and lies(lost) == (12.0, 70.5)
    assert busy.attributes == {names.REASON: "the queues are long", names.CLUSTER: "far"}
    assert lost.attributes == {names.REASON: "no node decodes"}
    assert (busy.error, lost.error) == ("", "refused")
    made.begin_attempt(route(), 71.0)
    assert not made.waits, "they were of this attempt"
    waits = [span for span in spans_of(kept(made, 80.0)) if span.name == names.WAIT]
    assert [lies(span) for span in waits] == [(10.5, 12.0), (12.0, 71.0)]


def test_spans_of_many_waits_have_ids_of_their_own() -> None:
    made = trace(10.0)
    for start_s in (10.5, 40.0):
        made.asked_s = start_s
        made.waits += [Wait(start_s + n, f"{n}", "far") for n in range(MOST_WAITS)]
        if start_s == 10.5:
            made.begin_attempt(route(), 30.0).fail("full", "no memory", 31.0)
    waits = [span for span in spans_of(kept(made, 60.0)) if span.name == names.WAIT]
    assert len(waits) == 2 * MOST_WAITS


def test_a_body_that_has_not_arrived() -> None:
    made = RequestTrace(10.0)
    spans = spans_of(kept(made, 40.0, "rejected", "the request body did not arrive within 30 s"))
    assert [(span.name, lies(span)) for span in spans] == [
        (names.REQUEST, (10.0, 40.0)),
        (names.READ, (10.0, 40.0)),
    ]
    assert not spans[0].error, "the client's fault is not an error of the deployment"


def test_a_request_in_progress_ends_now() -> None:
    made = trace(10.0)
    made.begin_attempt(route(), 11.0)
    spans = spans_of(kept(made, 12.0, IN_PROGRESS))
    assert {span.end_s for span in spans if span.name in (names.REQUEST, names.ATTEMPT)} == {
        EPOCH_S + 12.0
    }
    assert spans[0].attributes[names.OUTCOME] == IN_PROGRESS


def test_each_prompt_of_a_list_has_its_attempts() -> None:
    made = trace(10.0)
    prompts = [RequestTrace(10.4, made.context) for _ in range(3)]
    for number, prompt in enumerate(prompts):
        hand_off(prompt, 10.5, route(decode=f"home{number}"))
    asked = record(made)
    asked.prompts = [PromptRecord(prompt, 100, None) for prompt in prompts]
    made.summarise(prompts)
    spans = spans_of(KeptRequest(asked, "completed", "", 20.0))
    attempts = [span for span in spans if span.name == names.ATTEMPT]
    assert {span.parent_id for span in attempts} == {made.context.span_id} and len(attempts) == 3
    targets = [span.attributes[names.TARGET] for span in spans if span.name == names.DECODE]
    assert sorted(targets) == ["home0", "home1", "home2"]
    asked.prompts *= 100
    assert len(request_spans(KeptRequest(asked, "completed", "", 20.0), "m", 0.0)) == MOST_SPANS


def test_the_number_of_attempts_is_bounded() -> None:
    made = trace(10.0)
    for number in range(3 * MOST_COURSES):
        made.waits.append(Wait(11.0, f"{number}", "far"))
        made.begin_attempt(route(), 11.0 + number).fail("full", "no memory", 11.5)
    waited_for = [course.waits[0].reason for course in made.courses]
    assert len(waited_for) == MOST_COURSES and made.attempts == 3 * MOST_COURSES
    assert waited_for[0] == "0" and waited_for[-1] == f"{3 * MOST_COURSES - 1}"
    spans_of(kept(made, 200.0))


def test_a_clients_trace_goes_on() -> None:
    begun = RequestTrace.begin(10.0, PARENT, samples=False)
    assert (begun.context.trace_id, begun.parent_id) == ("cd" * 16, "ef" * 8)
    assert not begun.context.sampled and begun.context.span_id != "ef" * 8
    assert RequestTrace.begin(10.0, PARENT, samples=True).context.sampled
    assert RequestTrace.begin(10.0, PARENT[:-1] + "1", samples=False).context.sampled
    request = spans_of(kept(begun, 11.0))[0]
    assert (request.trace_id, request.parent_id) == ("cd" * 16, "ef" * 8)
    for header in (None, "", "nonsense", PARENT.replace("cd", "00")):
        new = RequestTrace.begin(10.0, header, samples=False)
        assert new.parent_id is None and new.context.trace_id not in ("cd" * 16, "00" * 16)


class Exporter:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, span: Span) -> None:
        self.spans.append(span)


def test_sampled_requests_are_exported_when_they_end() -> None:
    clock, exporter = FakeClock(20.0), Exporter()
    export = RequestExport(exporter, "m", clock, lambda: EPOCH_S + clock.now())
    observer = Observers([export])
    for sampled in (False, True):
        made = trace(10.0)
        made.context = made.context._replace(sampled=sampled)
        hand_off(made, 10.5, route())
        begun = record(made)
        observer.begin(begun)
        observer.end(begun, "completed", "", 20.0)
        expected = request_spans(KeptRequest(begun, "completed", "", 20.0), "m", EPOCH_S)
        assert exporter.spans == (expected if sampled else [])
    assert {span.trace_id for span in exporter.spans} == {TRACE_ID}
