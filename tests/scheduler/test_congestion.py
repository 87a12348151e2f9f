from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.congestion import DEFAULT_RULES, LinkHealth, LinkVerdict, judge
from prfaas.types import LinkStats

CLEAR, BUILDING, CONGESTED = LinkVerdict
CAPACITY_BPS = 1e9
SEGMENT_BITS = 1448 * 8
LADDERS = {
    "loss": DEFAULT_RULES.loss,
    "queueing": DEFAULT_RULES.queueing,
    "waiting": DEFAULT_RULES.waiting_s,
    "utilisation": DEFAULT_RULES.utilisation,
}


def report(at_s: float, **fields: Any) -> LinkStats:
    """A busy link with nothing wrong: half full, an RTT of 60 ms."""
    usual: dict[str, Any] = {
        "peer": "kv1",
        "connections": 8,
        "goodput_bps": 0.5e9,
        "backlog_bytes": 5_000_000,
        "in_flight_bytes": 3_000_000,
        "waited_s": 0.08,
        "rtt_s": 0.060,
        "delivery_bps": 0.5e9,
        "retransmitted_segments": 0,
        "congestion_window_bytes": 1_000_000,
    }
    return LinkStats(at_s=at_s, **(usual | fields))


class Link:
    """Feeds reports at a steady pace."""

    def __init__(self, every_s: float = 0.25, capacity_bps: float | None = CAPACITY_BPS) -> None:
        self.every_s = every_s
        self.capacity_bps = capacity_bps
        self.now_s = 1000.0
        self.health = LinkHealth()
        self.verdicts: list[LinkVerdict] = []

    def feed(self, **fields: Any) -> LinkVerdict:
        self.now_s += self.every_s
        self.health = judge(self.health, report(self.now_s, **fields), self.capacity_bps)
        self.verdicts.append(self.health.verdict)
        return self.health.verdict

    def feed_for(self, seconds: float, **fields: Any) -> LinkVerdict:
        for _ in range(math.ceil(seconds / self.every_s)):
            self.feed(**fields)
        return self.health.verdict

    def until(self, wanted: set[LinkVerdict], limit_s: float, **fields: Any) -> float:
        """How long it takes to reach one of `wanted`."""
        began_s = self.now_s
        while self.now_s - began_s < limit_s:
            if self.feed(**fields) in wanted:
                return self.now_s - began_s
        raise AssertionError(f"still {self.health.verdict.name} after {limit_s} s: {self.health}")

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.verdicts, self.verdicts[1:], strict=False))


def lost(share: float, every_s: float, goodput_bps: float = 0.5e9) -> int:
    return round(goodput_bps * every_s / SEGMENT_BITS * share)


@pytest.mark.parametrize("every_s", [0.25, 0.5])
@pytest.mark.parametrize(("share", "wanted"), [(0.003, BUILDING), (0.01, CONGESTED)])
def test_loss_changes_the_verdict_within_two_seconds_and_back(
    every_s: float, share: float, wanted: LinkVerdict
) -> None:
    link = Link(every_s)
    assert link.feed_for(5) is CLEAR
    assert link.until({wanted}, 2.0, retransmitted_segments=lost(share, every_s)) <= 2.0
    link.feed_for(10, retransmitted_segments=lost(share, every_s))
    assert (link.health.verdict, link.health.cause) == (wanted, "loss")
    assert DEFAULT_RULES.calm_s <= link.until({CLEAR}, 6.0) <= 4.5
    assert link.health.cause == ""
    assert link.changes <= 4  # at most two steps up and two down


def test_loss_shows_on_a_slow_link_too() -> None:
    """A loss-based sender at 1% and 60 ms is down to 20 Mbit/s."""
    link = Link()
    slow: dict[str, Any] = {"goodput_bps": 20e6, "delivery_bps": 20e6, "waited_s": 0.2}
    slow["backlog_bytes"] = 500_000
    link.feed_for(5, **slow)
    assert link.until({BUILDING, CONGESTED}, 2.0, **slow, retransmitted_segments=4) <= 2.0


def test_the_usual_loss_of_a_long_path_is_clear() -> None:
    link = Link()
    dice = random.Random(1)
    segments = int(0.5e9 * 0.25 / SEGMENT_BITS)
    for _ in range(200):
        link.feed(retransmitted_segments=sum(dice.random() < 0.0005 for _ in range(segments)))
    assert set(link.verdicts) == {CLEAR}


def test_one_lost_packet_is_not_a_trend() -> None:
    link = Link(0.5)
    idle: dict[str, Any] = {"goodput_bps": 1e5, "backlog_bytes": 0, "in_flight_bytes": 0}
    link.feed_for(2, **idle, waited_s=0.0)
    link.feed(**idle, waited_s=0.0, retransmitted_segments=1)
    assert link.health.verdict is CLEAR


@pytest.mark.parametrize(
    ("rtt_s", "verdict"), [(0.070, CLEAR), (0.085, BUILDING), (0.150, CONGESTED)]
)
def test_a_standing_queue_shows_in_the_rtt(rtt_s: float, verdict: LinkVerdict) -> None:
    link = Link()
    link.feed_for(2)
    assert link.feed(rtt_s=rtt_s) is CLEAR, "one report is not a standing queue"
    assert link.feed_for(1, rtt_s=rtt_s) is verdict
    assert link.health.cause == ("queueing" if verdict else "")
    assert link.feed_for(3) is CLEAR


def test_a_short_path_may_double_its_rtt() -> None:
    link = Link()
    link.feed(rtt_s=0.0002)
    assert link.feed_for(3, rtt_s=0.0012) is CLEAR
    assert link.feed_for(1.25, rtt_s=0.030) is CONGESTED


def test_a_longer_route_is_accepted_in_time_and_a_busy_quarter_hour_is_not() -> None:
    link = Link(0.5)
    link.feed_for(2)
    assert link.feed_for(15 * 60, rtt_s=0.120) is BUILDING
    assert link.feed_for(2 * 3600, rtt_s=0.120) is CLEAR


def test_an_idle_connection_remembers_an_old_rtt() -> None:
    link = Link()
    link.feed_for(2)
    assert link.feed_for(1.25, rtt_s=0.3) is CONGESTED
    idle: dict[str, Any] = {"goodput_bps": 0.0, "backlog_bytes": 0, "in_flight_bytes": 0}
    assert link.feed_for(4, rtt_s=0.3, waited_s=0.0, delivery_bps=None, **idle) is CLEAR


def test_bytes_that_wait_longer_and_longer() -> None:
    link = Link()
    link.feed_for(2)
    for waited_s in (0.2, 0.45, 0.7):
        assert link.feed(waited_s=waited_s) is CLEAR
    assert link.feed(waited_s=0.95) is BUILDING
    assert link.health.cause == "waiting"
    assert link.feed_for(1, waited_s=2.5) is CONGESTED
    assert link.feed_for(5) is CLEAR


def test_a_stopped_link_is_congested_and_recovers() -> None:
    link = Link()
    link.feed_for(2)
    stopped: dict[str, Any] = {"goodput_bps": 0.0, "delivery_bps": None}
    for tick in range(240):
        link.feed(**stopped, waited_s=0.25 * tick)
    assert link.health.verdict is CONGESTED
    assert link.until({CLEAR}, 7.0) <= 6.0


def test_a_full_link_on_which_no_byte_waits_is_clear() -> None:
    link = Link()
    assert link.feed_for(10, goodput_bps=0.99e9, waited_s=0.0) is CLEAR


def test_a_link_that_fills_warns_before_any_queue_stands() -> None:
    link = Link()
    link.feed_for(2)
    assert link.feed_for(2, goodput_bps=0.95e9) is BUILDING
    assert link.health.cause == "utilisation"
    assert link.feed_for(60, goodput_bps=0.99e9) is BUILDING
    assert link.feed_for(4) is CLEAR
    unknown = Link(capacity_bps=None)
    assert unknown.feed_for(5, goodput_bps=5e9) is CLEAR


def test_a_missing_signal_is_ignored() -> None:
    link = Link(capacity_bps=None)
    nothing: dict[str, Any] = {
        "rtt_s": None,
        "delivery_bps": None,
        "retransmitted_segments": None,
        "congestion_window_bytes": None,
    }
    assert link.feed_for(5, **nothing) is CLEAR
    link.feed_for(2, retransmitted_segments=1000)
    assert link.health.verdict is CONGESTED
    assert link.feed_for(4, **nothing) is CLEAR  # a signal that falls silent holds nothing


def test_old_and_repeated_reports_change_nothing() -> None:
    link = Link()
    link.feed_for(2)
    for at_s in (link.now_s, link.now_s - 1):
        awful = report(at_s, rtt_s=1.0, retransmitted_segments=10_000)
        assert judge(link.health, awful, CAPACITY_BPS) is link.health


def test_a_restarted_sender_resets_the_state() -> None:
    link = Link()
    link.feed_for(2, retransmitted_segments=1000)
    assert link.health.verdict is CONGESTED
    fresh = judge(link.health, report(1.0), CAPACITY_BPS)
    assert fresh == judge(LinkHealth(), report(1.0), CAPACITY_BPS)


def test_a_gap_between_reports_is_not_calm() -> None:
    link = Link()
    link.feed_for(4, retransmitted_segments=lost(0.01, 0.25))
    link.feed_for(1)  # calm begins
    assert link.health.below_congested_since_s is not None
    link.now_s += 30
    assert link.feed() is CONGESTED
    assert link.feed_for(3) is CLEAR


# Properties ---------------------------------------------------------------------------------------

reports = st.fixed_dictionaries(
    {
        "goodput_bps": st.floats(0, 2e9),
        "backlog_bytes": st.integers(0, 10**10),
        "in_flight_bytes": st.integers(0, 10**8),
        "waited_s": st.floats(0, 100),
        "rtt_s": st.none() | st.floats(1e-5, 2),
        "delivery_bps": st.none() | st.floats(0, 2e9),
        "retransmitted_segments": st.none() | st.integers(0, 20_000),
    }
)
histories = st.lists(st.tuples(st.floats(0.25, 0.5), reports), max_size=12)
capacities = st.none() | st.floats(1e6, 1e10)


def after(history: list[tuple[float, dict[str, Any]]], capacity_bps: float | None) -> LinkHealth:
    health, now_s = LinkHealth(), 10.0
    for gap_s, fields in history:
        now_s += gap_s
        health = judge(health, report(now_s, **fields), capacity_bps)
    return health


@settings(deadline=None, max_examples=300)
@given(
    histories,
    reports,
    capacities,
    st.floats(1, 10),
    st.floats(0, 10),
    st.integers(0, 5000),
    st.floats(0.1, 1),
)
def test_worse_signals_never_give_a_better_verdict(
    history: list[tuple[float, dict[str, Any]]],
    fields: dict[str, Any],
    capacity_bps: float | None,
    slower: float,
    longer_s: float,
    more_lost: int,
    narrower: float,
) -> None:
    health = after(history, capacity_bps)
    at_s = (health.at_s or 10.0) + 0.3
    better = report(at_s, **fields)
    # A longer RTT than the path's own makes bytes wait as long, so both grow together.
    extra_rtt_s = None if better.rtt_s is None else better.rtt_s * slower - better.rtt_s
    worse = msgspec.structs.replace(
        better,
        rtt_s=None if extra_rtt_s is None or better.rtt_s is None else better.rtt_s + extra_rtt_s,
        waited_s=better.waited_s + longer_s + (extra_rtt_s or 0.0),
        delivery_bps=None,
        retransmitted_segments=None
        if better.retransmitted_segments is None
        else better.retransmitted_segments + more_lost,
    )
    worse_capacity = None if capacity_bps is None else capacity_bps * narrower
    verdict = judge(health, better, capacity_bps).verdict
    assert judge(health, worse, worse_capacity).verdict >= verdict


@pytest.mark.parametrize("signal", ["loss", "queueing", "waiting", "utilisation"])
def test_a_slow_swing_within_the_band_changes_nothing(signal: str) -> None:
    """Slower than the calm, so that only the distance of `enter` and `leave` can hold it."""
    threshold = LADDERS[signal].building
    assert threshold.leave < 0.9 * threshold.enter
    link = Link()
    link.feed_for(3)
    assert link.feed_for(6, **_at(signal, threshold.enter * 1.05, 0.25)) is BUILDING
    link.verdicts.clear()
    for _ in range(3):
        link.feed_for(
            6, **_at(signal, threshold.leave + 0.3 * (threshold.enter - threshold.leave), 0.25)
        )
        link.feed_for(6, **_at(signal, threshold.enter * 1.05, 0.25))
    assert set(link.verdicts) == {BUILDING}


def test_a_short_pause_is_not_a_stop() -> None:
    """BBR measures the empty path: for one report next to nothing passes, and bytes wait."""
    link = Link()
    link.feed_for(5)
    link.feed(goodput_bps=0.05e9, waited_s=0.35)
    link.feed_for(5)
    assert set(link.verdicts) == {CLEAR}


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["loss", "queueing", "waiting", "utilisation"]),
    st.integers(0, 1),
    st.integers(0, 2**32),
    st.floats(0.25, 0.5),
)
def test_noise_around_a_threshold_changes_the_verdict_at_most_once(
    signal: str, step: int, seed: int, every_s: float
) -> None:
    dice = random.Random(seed)
    ladder = LADDERS[signal]
    threshold = (ladder.building, ladder.congested)[step]
    if math.isinf(threshold.enter):
        threshold = ladder.building
    link = Link(every_s)
    link.feed_for(3)
    if step and threshold is not ladder.building:  # already on the step below
        link.feed_for(3, **_at(signal, (ladder.building.enter + threshold.leave) / 2, every_s))
    link.verdicts.clear()
    for _ in range(200):
        swing = (threshold.enter - threshold.leave) * 0.9
        link.feed(**_at(signal, threshold.enter + dice.uniform(-swing, swing), every_s))
    assert link.changes <= 1


def _at(signal: str, value: float, every_s: float) -> dict[str, Any]:
    """A report whose `signal` has this value."""
    if signal == "loss":
        segments = 0.5e9 * every_s / SEGMENT_BITS
        return {"retransmitted_segments": round(segments * value / (1 - value))}
    if signal == "queueing":
        return {"rtt_s": 0.060 + value * (0.060 + DEFAULT_RULES.rtt_noise_s)}
    if signal == "waiting":
        return {"waited_s": value}
    return {"goodput_bps": value * CAPACITY_BPS}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.floats(0.25, 0.5), reports), min_size=1, max_size=80), capacities)
def test_changes_are_bounded_for_any_reports(
    history: list[tuple[float, dict[str, Any]]], capacity_bps: float | None
) -> None:
    """An improvement takes `calm_s` of calm: two steps down and two up fit into that time."""
    health, now_s, changes = LinkHealth(), 10.0, 0
    for gap_s, fields in history:
        now_s += gap_s
        then = judge(health, report(now_s, **fields), capacity_bps)
        changes += then.verdict != health.verdict
        assert then.cause != "" if then.verdict else then.cause == ""
        health = then
    assert changes <= 4 * ((now_s - 10.0) / DEFAULT_RULES.calm_s + 1)


def test_a_state_is_plain_data() -> None:
    state = judge(LinkHealth(), report(1.0), CAPACITY_BPS)
    assert replace(state) == state
    assert asdict(state)["verdict"] == CLEAR
