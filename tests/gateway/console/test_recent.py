"""The latest requests: what they add up to, and what is kept of them."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.console.scene import TtftParts
from prfaas.gateway.api.metrics import PromptRecord, RequestRecord
from prfaas.gateway.console.recent import EXPLAINED_PER_S, KEPT, HomeCounts, RecentRequests
from prfaas.gateway.following.export import Observers
from prfaas.gateway.following.kept_requests import IN_PROGRESS, RequestHistory
from prfaas.gateway.request import RequestTrace
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.waiting import Hold
from prfaas_lab.testing.clock import FakeClock

EPOCH_S = 1_000_000.0


class Made:
    """Recent requests on a clock of its own; the epoch began long before it."""

    def __init__(self) -> None:
        self.clock = FakeClock(50.0)
        self.history = RequestHistory(self.clock)
        self.recent = RecentRequests(self.clock, self.history, lambda: EPOCH_S + self.clock.now())
        self.observer = Observers([self.history, self.recent])

    def begin(self, name: str = "r", *, stream: bool = True, **fields: Any) -> RequestRecord:
        trace = RequestTrace(self.clock.now(), home="pd", reason="long", attempts=1, **fields)
        record = RequestRecord(name, "/v1/completions", "", trace, 100, stream=stream)
        self.observer.begin(record)
        return record

    def first_token(self, record: RequestRecord, after_s: float = 2.0) -> None:
        record.trace.routed_s = self.clock.now()
        self.clock.advance(after_s)
        record.trace.first_token_s = self.clock.now()

    def end(self, record: RequestRecord, outcome: str = "completed", error: str = "") -> None:
        self.observer.end(record, outcome, error, self.clock.now())


@pytest.fixture
def made() -> Made:
    return Made()


def test_a_request_is_shown_with_its_first_token_and_when_it_has_ended(made: Made) -> None:
    record = made.begin(cached_tokens=40, stateless_tokens=8)
    assert made.recent.take_new() == [], "it waits"
    found = made.recent.find("r")
    assert found is not None and found.scene.route == "none" and found.scene.ttft_s is None
    record.trace.offloaded = True
    made.first_token(record)
    (shown,) = made.recent.take_new()
    assert (shown.outcome, shown.ttft_s, shown.at_s) == (IN_PROGRESS, 2.0, EPOCH_S + 50.0)
    assert made.recent.take_new() == [] and made.recent.kept() == [shown]
    made.clock.advance(1.0)
    made.end(record)
    (ended,) = made.recent.take_new()
    assert (ended.id, ended.outcome, ended.route, ended.total_s) == ("r", "completed", "remote", 3)
    assert made.recent.kept() == [ended]
    counts = made.recent.counts()
    assert counts.ttft == TtftParts(1, 0.0, 2.0, 0.0, 0.0), "a first token counts once"
    assert counts.homes == {"pd": HomeCounts(0, 1, 0, 100, 40, 8)}


def test_outcomes(made: Made) -> None:
    for outcome in ("completed", "cancelled", "failed", "broken", "shed", "rejected"):
        record = made.begin(outcome)
        if outcome in ("completed", "cancelled", "broken"):
            made.first_token(record)
        made.end(record, outcome, "" if outcome == "completed" else f"why {outcome}")
    counts = made.recent.counts()
    assert (counts.homes["pd"].local, counts.homes["pd"].failed) == (2, 3)
    found = made.recent.find("shed")
    assert found is not None and found.failures == ["why shed"] and found.explanation is None


def test_an_answer_that_does_not_stream_has_no_first_token(made: Made) -> None:
    record = made.begin(stream=False)
    made.first_token(record)
    made.end(record)
    found = made.recent.find("r")
    assert found is not None and found.scene.ttft_s is None and found.scene.prefill_s == 0
    assert made.recent.counts().ttft.first_tokens == 0
    assert made.recent.counts().homes["pd"].local == 1


def test_a_list_of_prompts_counts_each_of_them(made: Made) -> None:
    record = made.begin()
    traces = [RequestTrace(made.clock.now(), home=home) for home in ("pd", "pd", "west")]
    traces[0].offloaded = True
    for trace in traces:
        trace.routed_s = made.clock.now()
        made.clock.advance(1.0)
        trace.first_token_s = made.clock.now()
    record.trace.summarise(traces)
    record.prompts = [PromptRecord(trace, 10, None) for trace in traces]
    made.end(record)
    counts = made.recent.counts()
    assert counts.ttft.first_tokens == 3
    assert (counts.homes["pd"].remote, counts.homes["pd"].local) == (1, 1)
    assert counts.homes["west"] == HomeCounts(local=1, prompt_tokens=10)
    found = made.recent.find("r")
    assert found is not None and found.scene.route == "mixed" and found.scene.prefill_s == 1.0


def test_what_is_kept_is_bounded(made: Made) -> None:
    for number in range(KEPT + 50):
        record = made.begin(f"r{number}")
        record.trace.failures = ["x" * 400] * 10
        made.end(record, "failed", "y" * 500)
    assert len(made.recent.kept()) == len(made.recent.take_new()) == KEPT
    found = made.recent.find(f"r{KEPT}")
    assert found is not None and len(found.failures) == 9
    assert all(len(failure) < 400 for failure in found.failures)


def test_routes_are_explained_while_a_console_is_open_and_at_a_bounded_rate(made: Made) -> None:
    assert not made.recent.wants_explanation()
    made.recent.watched = True
    for _ in range(3):
        wanted = [made.recent.wants_explanation() for _ in range(3 * EXPLAINED_PER_S)]
        assert sum(wanted) == EXPLAINED_PER_S
        made.clock.advance(1.0)
    record = made.begin()
    record.trace.explanation = Explanation(Hold("full", None, 0.0, 0.0), 1000.0, ())
    made.end(record)
    found = made.recent.find("r")
    assert found is not None and found.explanation is record.trace.explanation


def test_ids_may_repeat(made: Made) -> None:
    one, two = made.begin("same"), made.begin("same")
    made.end(one, "failed")
    found = made.recent.find("same")
    assert found is not None and found.scene.outcome == IN_PROGRESS
    made.end(two)
    found = made.recent.find("same")
    assert found is not None and found.scene.outcome == "completed"
