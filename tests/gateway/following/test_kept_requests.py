"""Which requests a gateway keeps, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.gateway.api.metrics import RequestRecord
from prfaas.gateway.following import kept_requests
from prfaas.gateway.following.kept_requests import (
    FAILED,
    IN_PROGRESS,
    LATEST,
    SLOWEST,
    WINDOW_S,
    KeptRequest,
    RequestHistory,
)
from prfaas.gateway.following.summaries import summary_of
from prfaas.gateway.request import RequestTrace
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.following.builders import EPOCH_S, kept, record, trace


class Made:
    def __init__(self) -> None:
        self.clock = FakeClock(50.0)
        self.history = RequestHistory(self.clock)

    def begin(self, name: str, *, stream: bool = True) -> RequestRecord:
        begun = record(RequestTrace(self.clock.now()), name, stream=stream)
        self.history.begin(begun)
        return begun

    def serve(
        self,
        name: str,
        seconds: float = 1.0,
        outcome: str = "completed",
        *,
        error: str = "",
        **options: Any,
    ) -> RequestRecord:
        """`seconds`: until the first token, after which the answer takes an hour."""
        begun = self.begin(name, **options)
        self.clock.advance(seconds)
        begun.trace.first_token_s = self.clock.now()
        self.clock.advance(0.0 if not begun.stream else 10.0)
        self.history.end(begun, outcome, error, self.clock.now())
        return begun


@pytest.fixture
def made() -> Made:
    return Made()


def names(kept: list[KeptRequest]) -> list[str]:
    return [each.record.id for each in kept]


def test_the_newest_come_first_and_those_in_progress_before_them(made: Made) -> None:
    for number in range(LATEST + 5):
        made.serve(f"r{number}")
    assert names(made.history.latest())[:2] == [f"r{LATEST + 4}", f"r{LATEST + 3}"]
    assert len(made.history.latest()) == LATEST
    made.begin("early")
    made.clock.advance(1.0)
    made.begin("late")
    latest = made.history.latest()
    assert names(latest)[:3] == ["late", "early", f"r{LATEST + 4}"] and len(latest) == LATEST
    assert {each.outcome for each in latest[:2]} == {IN_PROGRESS}
    assert latest[1].ended_s == made.clock.now()


def test_failed_requests_are_those_of_the_deployment(made: Made) -> None:
    for outcome in ("completed", "cancelled", "rejected", "failed", "broken", "shed", "stalled"):
        made.serve(outcome, outcome=outcome)
    refused = made.begin("refused")
    refused.prompt_tokens = 0  # by a limit, before its body was read
    made.history.end(refused, "shed", "too many requests", made.clock.now())
    assert names(made.history.failed()) == ["shed", "broken", "failed"]
    assert names(made.history.latest())[0] == "refused"
    for number in range(FAILED + 1):
        made.serve(f"f{number}", outcome="failed")
    assert names(made.history.failed()) == [f"f{number}" for number in range(FAILED, 0, -1)]


def test_streams_are_slow_by_their_first_token_and_others_by_their_whole_answer(made: Made) -> None:
    for number in range(SLOWEST + 10):
        made.serve(f"s{number}", number % 7)
    made.serve("slow", 30.0)
    made.serve("whole", 20.0, stream=False)
    waited = made.begin("gave up")
    made.clock.advance(25.0)
    made.history.end(waited, "cancelled", "", made.clock.now())
    made.serve("rejected", 99.0, "rejected")
    slowest = made.history.slowest()
    assert names(slowest)[:3] == ["slow", "gave up", "whole"]
    assert [each.waited_s for each in slowest] == sorted(
        (each.waited_s for each in slowest), reverse=True
    )
    assert len(slowest) == SLOWEST + 1


def test_a_slow_request_is_forgotten_after_two_windows(made: Made) -> None:
    made.serve("slow", 100.0)
    made.clock.advance(WINDOW_S)
    made.serve("fast", 0.1)
    assert names(made.history.slowest()) == ["slow", "fast"]
    made.clock.advance(WINDOW_S)
    assert names(made.history.slowest()) == ["fast"]
    made.clock.advance(3 * WINDOW_S)
    assert names(made.history.slowest()) == []


def test_a_request_is_found_by_its_id_or_its_trace_id(made: Made) -> None:
    first, second = made.serve("same"), made.serve("same", 2.0)
    running = made.begin("running")
    history = made.history
    for name, expected in (
        ("same", second),
        (first.trace.context.trace_id, first),
        ("running", running),
    ):
        found = history.find(name)
        assert found is not None and found.record is expected
    assert history.find("other") is None
    slow = made.serve("slow", 100.0)
    failed = made.serve("failed", outcome="failed")
    for number in range(LATEST):
        made.serve(f"r{number}")
    for name, expected in (("slow", slow), ("failed", failed)):
        found = history.find(name)
        assert found is not None and found.record is expected


def test_texts_are_bounded(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_requests, "MOST_CHARS", 20_000)
    for number in range(60):
        begun = made.begin(f"r{number}")
        begun.trace.failures += ["x" * 1000] * 2
        made.clock.advance(6.0 - number / 10)
        made.history.end(begun, "failed", "y" * 500, made.clock.now())
    history = made.history
    for found in (history.latest(), history.failed(), history.slowest()):
        assert 0 < len(found) <= 20_000 // 2500
    assert names(history.latest())[0] == names(history.failed())[0] == "r59"
    assert names(history.slowest())[0] == "r0", "the slowest stay"


def test_summary() -> None:
    made = trace(10.0, home="pd", attempts=2, cached_tokens=64, prefill="far0", decode="home1")
    made.first_token_s, made.routed_s = 12.5, 11.0
    summary = summary_of(kept(made, 14.0, "failed", "x" * 1000), EPOCH_S)
    assert (summary.id, summary.trace_id, summary.at_s) == ("r", "ab" * 16, EPOCH_S + 10.0)
    assert (summary.ttft_s, summary.total_s, summary.attempts) == (2.5, 4.0, 2)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (1000, 64, 7)
    assert (summary.prefill, summary.decode, summary.route) == ("far0", "home1", "local")
    assert len(summary.error) == 300
    whole = KeptRequest(record(made, stream=False), "completed", "", 14.0)
    assert summary_of(whole, EPOCH_S).ttft_s is None
