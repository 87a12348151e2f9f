"""The path by itself, in made-up time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.wan.path import (
    CHUNK_BYTES,
    QUEUE_S,
    Conditions,
    Lane,
    PathClock,
    PathState,
    Recurring,
)

GBPS = 1e9


def test_a_chunk_leaves_after_its_bits_and_the_delay() -> None:
    lane = Lane(Conditions(rate_bps=GBPS, rtt_s=0.060), seed=0)
    assert lane.admit(125_000, now_s=5.0) == pytest.approx(5.0 + 0.001 + 0.030)
    # The second waits for the first, whichever connection it belongs to.
    assert lane.admit(125_000, now_s=5.0) == pytest.approx(5.0 + 0.002 + 0.030)


def test_an_idle_lane_does_not_save_up_capacity() -> None:
    lane = Lane(Conditions(rate_bps=GBPS), seed=0)
    lane.admit(125_000, now_s=0.0)
    assert lane.admit(125_000_000, now_s=100.0) == pytest.approx(101.0)


def test_a_booked_lane_takes_no_more() -> None:
    lane = Lane(Conditions(rate_bps=GBPS), seed=0)
    assert lane.wait_s(0.0) == 0.0
    lane.admit(int(GBPS / 8), now_s=0.0)
    assert lane.wait_s(0.0) == pytest.approx(1.0 - QUEUE_S)
    assert lane.wait_s(1.0) == 0.0


@settings(deadline=None)  # a busy machine is not a failure
@given(
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(0, CHUNK_BYTES)), min_size=1, max_size=60),
    st.floats(1e6, 1e11),
    st.floats(0, 0.2),
    st.floats(0, 0.05),
)
def test_never_early_never_above_the_rate(
    arrivals: list[tuple[float, int]], rate_bps: float, rtt_s: float, jitter_s: float
) -> None:
    lane = Lane(Conditions(rate_bps, rtt_s, jitter_s), seed=1)
    now_s = sent_bytes = 0.0
    for gap_s, size in arrivals:
        now_s += gap_s
        sent_bytes += size
        leaves_s = lane.admit(size, now_s)
        assert leaves_s >= now_s + rtt_s / 2
        # All so far have passed the lane by `leaves_s - delay`: at the rate, since the start.
        # 1e-12 s is what the subtraction may round away.
        assert leaves_s - rtt_s / 2 >= sent_bytes * 8 / rate_bps - 1e-12


def test_jitter_only_adds() -> None:
    lane = Lane(Conditions(rtt_s=0.060, jitter_s=0.010), seed=0)
    extra = [lane.admit(1, 0.0) - 0.030 for _ in range(200)]
    assert min(extra) >= 0
    assert 0.008 < max(extra) <= 0.010


def test_one_connection_may_hold_what_the_rate_needs() -> None:
    conditions = Conditions(rate_bps=GBPS, rtt_s=0.060, jitter_s=0.005)
    assert conditions.held_bytes >= GBPS / 8 * (0.030 + 0.005)
    assert conditions.chunk_bytes == 250_000
    assert Conditions(rate_bps=1e6).chunk_bytes == 16 * 1024
    assert Conditions().chunk_bytes == CHUNK_BYTES


def test_the_schedule_of_faults() -> None:
    plan = Conditions(stall=Recurring(10, 2), outage=Recurring(25, 1), cut_every_s=7)
    states = [plan.scheduled_state(t) for t in (0, 1, 9.9, 10, 11.9, 12, 20.5, 25.5, 26.5)]
    up, stalled, out = PathState.UP, PathState.STALLED, PathState.OUT
    assert states == [up, up, up, stalled, stalled, up, stalled, out, up]
    assert [plan.cuts_until(t) for t in (0, 6.9, 7, 15)] == [0, 0, 1, 2]
    assert plan.until_change_s(0) == 7  # a cut
    assert plan.until_change_s(8) == 2  # the stall begins
    assert plan.until_change_s(11) == 1  # and ends
    assert Conditions().until_change_s(3) == math.inf


def test_path_time_stands_still_with_the_path() -> None:
    clock = PathClock()
    clock.stop(10.0)
    clock.stop(11.0)
    assert clock.read(12.0) == 10.0
    clock.go(15.0)
    clock.go(16.0)
    assert clock.read(17.0) == 12.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Conditions(rate_bps=0),
        lambda: Conditions(rate_bps=math.nan),
        lambda: Conditions(rtt_s=-1),
        lambda: Conditions(jitter_s=math.inf),
        lambda: Conditions(cut_every_s=0),
        lambda: Recurring(1, 1),
        lambda: Recurring(1, 0),
        lambda: Recurring(math.inf, 1),
    ],
)
def test_impossible_conditions_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        make()
