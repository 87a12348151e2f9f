"""Spans of several processes are compared, so none may be shifted by an interruption."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.tracing.epoch import EpochOffset

EPOCH_S = 1_000_000.0
READING_S = 2.0**-20  # of a clock by a process that is not interrupted
# Binary fractions, so that sums are exact.
INTERRUPTIONS_S = st.integers(0, 2**22).map(lambda ticks: ticks * 2.0**-20)


class Clocks:
    """Two clocks of one process, which is interrupted before some of its readings."""

    def __init__(self) -> None:
        self.true_s = 0.0
        self.set_s = EPOCH_S
        self.interruptions_s: list[float] = []

    def now(self) -> float:
        self.true_s += READING_S
        if self.interruptions_s:
            self.true_s += self.interruptions_s.pop()
        return self.true_s

    def wall(self) -> float:
        return self.now() + self.set_s


@given(st.lists(st.lists(INTERRUPTIONS_S, max_size=3), max_size=20))
def test_interruptions_do_not_shift_a_span(readings: list[list[float]]) -> None:
    clocks = Clocks()
    offset = EpochOffset(clocks, clocks.wall)
    for interruptions_s in readings:
        clocks.interruptions_s = interruptions_s
        assert abs(offset.seconds() - EPOCH_S) <= READING_S
        clocks.interruptions_s = []


@given(INTERRUPTIONS_S, INTERRUPTIONS_S, st.floats(-1e5, 1e5))
def test_one_reading_without_interruption_at_the_start_is_enough(
    first_s: float, second_s: float, set_s: float
) -> None:
    clocks = Clocks()
    clocks.interruptions_s = [first_s, second_s]
    offset = EpochOffset(clocks, clocks.wall)
    assert abs(offset.seconds() - EPOCH_S) <= READING_S
    clocks.set_s += set_s
    assert abs(offset.seconds() - clocks.set_s) <= 2 * READING_S
