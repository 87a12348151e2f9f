"""From the times of samples to a profile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import EngineError
from prfaas.measure.measured_profile import (
    WARM_STEPS,
    MeasuredProfile,
    levelled,
    step_together_s,
)
from prfaas.planner.profile import DecodeStep, PrefillTime


def test_a_step_is_timed_while_all_sequences_run() -> None:
    """From the moments of the sequence that came last, without its first steps, until the first
    sequence has ended."""
    steps = WARM_STEPS + 4
    early = [0.5 * at for at in range(4 + steps)]  # one sequence only: half a second per token
    alone_until_s = early[3]
    late = [alone_until_s + 2.0 * at for at in range(1, steps + 3)]
    early[4:] = late[:steps]
    assert step_together_s([early, late]) == pytest.approx(2.0)
    with pytest.raises(EngineError, match="never ran together"):
        step_together_s([[0.0, 1.0], [5.0, 6.0]])


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12))
def test_levelled_times_rise_and_keep_their_sum(times: list[float]) -> None:
    rising = levelled(times)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(rising, rising[1:], strict=False))
    assert sum(rising) == pytest.approx(sum(times))
    if times == sorted(times):
        assert rising == times


def test_noise_is_levelled_and_owned_up_to() -> None:
    assert levelled([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert levelled([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    times = (PrefillTime(10, 0, 1.0), PrefillTime(20, 0, 1.0))
    measured = MeasuredProfile(times, {}, (DecodeStep(1, 0.5),), 10, rounds=3, levelled=0.25)
    record = measured.record(model="m", accelerator="a", engine="e", by="me, today")
    assert record.provenance == (
        "measured: me, today; median of 3; decode after 10 tokens; "
        "times levelled by up to 25.0% to rise with length"
    )
    assert [point.seconds for point in record.prefill] == [1.0, 1.0]
