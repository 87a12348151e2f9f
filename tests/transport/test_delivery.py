"""Ages and rates of a link, with a clock that the test drives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.lateness import never_late
from prfaas.transport.delivery import GRACE_S, LEAST_BYTES, WINDOW_S, Delivery, DeliveryReport

MB = 1_000_000


class Path:
    """A first-in first-out link of a given rate: what it delivers, step by step."""

    def __init__(self, bps: float, rtt_s: float = 0.0, step_s: float = 0.05) -> None:
        self.bps = bps
        self.step_s = step_s
        self.now = 100.0
        self.waiting = 0.0
        self.subject = Delivery()
        self.subject.record_round_trip(rtt_s, self.now)

    def run(self, seconds: float, offered_bps: float = 0.0) -> None:
        for _ in range(round(seconds / self.step_s)):
            offered = int(offered_bps / 8 * self.step_s)
            if offered:
                self.give(offered)
            self.now += self.step_s
            before = int(self.waiting)
            arrived = min(before, int(self.bps / 8 * self.step_s))
            if arrived:
                self.waiting -= arrived
                self.subject.record_arrival(arrived, before, self.now)

    def give(self, nbytes: int) -> None:
        self.waiting += nbytes
        self.subject.record_ready(nbytes, self.now)

    def report(self) -> DeliveryReport:
        return self.subject.report(int(self.waiting), self.now, never_late)


def test_a_link_that_carries_what_it_is_given_has_no_rate() -> None:
    path = Path(bps=100e6)
    path.run(10, offered_bps=10e6)
    report = path.report()
    assert report.delivery_bps is None and report.waited_s <= path.step_s
    assert report.total_bytes == pytest.approx(10 * 10e6 / 8, rel=0.01)


def test_a_link_that_is_given_too_much_shows_its_rate() -> None:
    path = Path(bps=20e6)
    path.run(3, offered_bps=40e6)
    report = path.report()
    assert report.delivery_bps == pytest.approx(20e6, rel=0.01)
    assert report.waited_s == pytest.approx(1.5, rel=0.1), "half of the bytes have arrived"


@settings(deadline=None)
@given(
    st.floats(2 * LEAST_BYTES * 8 / WINDOW_S, 1e9),
    st.floats(2, 100),
    st.sampled_from([0.02, 0.05, 0.25]),
)
def test_a_throttled_link_is_known_within_two_seconds(
    bps: float, faster: float, step_s: float
) -> None:
    """Of a busy link that suddenly carries less: the rate of before is forgotten in time."""
    path = Path(faster * bps, step_s=step_s)
    path.run(5, offered_bps=0.9 * faster * bps)
    path.bps = bps
    path.run(GRACE_S + WINDOW_S + 0.75, offered_bps=0.9 * faster * bps)
    found = path.report().delivery_bps
    assert found is not None and bps / 2 <= found <= bps * 2


def test_the_first_bytes_after_a_pause_are_no_rate() -> None:
    path = Path(bps=20e6)
    path.run(3, offered_bps=40e6)
    path.run(20)
    assert path.waiting == 0 and path.report() == (path.subject.total_bytes, 0.0, None)
    path.give(MB)
    path.run(0.1)
    assert path.report().delivery_bps is None


def test_a_path_of_a_long_round_trip_does_not_stand() -> None:
    """Every byte is acknowledged half a second after it was sent, however fast the link is."""
    subject, now = Delivery(), 0.0
    subject.record_round_trip(0.5, now)
    on_the_way: list[tuple[float, int]] = []
    for _ in range(100):
        now += 0.05
        subject.record_ready(100_000, now)
        on_the_way.append((now + 0.52, 100_000))
        while on_the_way[0][0] <= now:
            outstanding = sum(nbytes for _, nbytes in on_the_way)
            subject.record_arrival(on_the_way.pop(0)[1], outstanding, now)
    report = subject.report(sum(nbytes for _, nbytes in on_the_way), now, never_late)
    assert report.delivery_bps is None and report.waited_s <= 0.1


def test_what_the_sender_missed_itself_is_not_the_paths() -> None:
    subject = Delivery()
    subject.record_ready(MB, 10.0)
    assert subject.report(MB, 13.0, never_late).waited_s == 3
    assert subject.report(MB, 13.0, lambda since_s: 13.0 - since_s - 0.5).waited_s == 0.5


def test_a_rate_of_a_sender_that_was_mostly_late_is_not_believed() -> None:
    path = Path(bps=20e6)
    path.run(3, offered_bps=40e6)
    late = path.subject.report(
        int(path.waiting), path.now, lambda since_s: 0.6 * (path.now - since_s)
    )
    assert late.delivery_bps is None
    assert path.report().delivery_bps is not None


def test_a_stop_has_no_rate_and_waits() -> None:
    path = Path(bps=20e6)
    path.run(3, offered_bps=40e6)
    path.bps = 0
    path.run(2)
    report = path.report()
    assert report.delivery_bps is None and report.waited_s > 2


def test_a_very_slow_link_is_measured_over_longer() -> None:
    path = Path(bps=40e3)  # 5,000 bytes a second
    path.give(MB)
    path.run(6)
    assert path.report().delivery_bps == pytest.approx(40e3, rel=0.1)


def test_the_round_trip_creeps() -> None:
    subject = Delivery()
    subject.record_round_trip(0.01, 0.0)
    for second in range(600):
        subject.record_round_trip(5.0, float(second))  # a queue that stands for ten minutes
    subject.record_ready(MB, 1000.0)
    assert subject.report(MB, 1003.0, never_late).waited_s > 2
    for second in range(4 * 3600):
        subject.record_round_trip(0.5, 1000.0 + second)  # a longer route, for good
    subject.record_ready(MB, 20_000.0)
    assert subject.report(MB, 20_001.0, never_late).waited_s == pytest.approx(0.5, abs=0.1)
