from __future__ import annotations

import pytest

from prfaas.lateness import BEAT_S, MEMORY_S, TOLERANCE_S, Lateness, LatenessMonitor
from tests.waiting import wait_until


def regular(subject: Lateness, begin_s: float, seconds: float) -> float:
    now = begin_s
    while now < begin_s + seconds:
        now += BEAT_S
        subject.beat(now)
    return now


def test_a_regular_beat_is_never_late() -> None:
    subject = Lateness(10.0)
    now = regular(subject, 10.0, 5.0)
    assert subject.since(0.0, now) == 0
    assert subject.since(0.0, now + BEAT_S) == 0, "the next beat is not due for longer yet"


def test_the_time_between_due_and_done_is_late() -> None:
    subject = Lateness(10.0)
    now = regular(subject, 10.0, 1.0)
    subject.beat(now + BEAT_S + 0.3)
    done = regular(subject, now + BEAT_S + 0.3, 1.0)
    assert subject.since(0.0, done) == pytest.approx(0.3)
    assert subject.since(now + BEAT_S + 0.1, done) == pytest.approx(0.2), "only what lies after it"
    assert subject.since(done - 0.5, done) == 0


def test_a_beat_that_is_overdue_counts_before_it_is_done() -> None:
    subject = Lateness(10.0)
    overdue_s = 2.0
    seen = subject.since(0.0, 10.0 + BEAT_S + TOLERANCE_S + overdue_s)
    assert seen == pytest.approx(overdue_s)


def test_small_delays_of_timers_do_not_count() -> None:
    subject = Lateness(0.0)
    now = 0.0
    for _ in range(100):
        now += BEAT_S + 0.9 * TOLERANCE_S
        subject.beat(now)
    assert subject.since(0.0, now) == 0


def test_what_is_long_ago_is_forgotten() -> None:
    subject = Lateness(0.0)
    subject.beat(5.0)
    now = regular(subject, 5.0, MEMORY_S + 1)
    assert subject.since(0.0, now) == 0


class _Stuck:
    """A clock that jumps once, as it looks to a process that was stopped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.reads = 0

    def now(self) -> float:
        self.reads += 1
        return self.reads * BEAT_S / 10 + self.ahead_s


def test_the_monitor_beats() -> None:
    clock = _Stuck()
    monitor = LatenessMonitor(clock)
    try:
        began = clock.reads
        wait_until(lambda: clock.reads > began + 3)
        clock.ahead_s = 30.0
        wait_until(lambda: monitor.within(60.0) >= 29.0)
    finally:
        monitor.close()
