from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_lab.faults.growth import (
    LEAST_BLOCKS,
    MATERIAL_BYTES_PER_HOUR,
    SETTLED_S,
    WARM_S,
    Growth,
    Sample,
    Slope,
    slope_of,
)
from prfaas_lab.faults.resource_usage import ResourceUsage

Series = npt.NDArray[np.floating[Any]]
MB = 1e6
EVERY_S = 5.0
SOAK = np.arange(0.0, 1800.0, EVERY_S)
LEAK = 5 * MB / (18 * 60)  # bytes per second, of a transport worker of 35 MB


def growth(nbytes: Series, at_s: Series = SOAK, pids: npt.ArrayLike = 1) -> Growth:
    pid_of = np.broadcast_to(pids, at_s.shape)
    return Growth.of(
        [
            Sample(at, {"p": ResourceUsage(int(pid), 5, round(size))})
            for at, pid, size in zip(at_s, pid_of, nbytes, strict=True)
        ]
    )["p"]


def noise(seed: int, *, alike_s: float, of: Series = SOAK) -> Series:
    """Of a standard deviation of 1, and alike for about so many seconds."""
    draw = np.random.default_rng(seed)
    keeps = np.exp(-EVERY_S / alike_s)
    values = [draw.normal()]
    for step in draw.normal(size=len(of) - 1):
        values.append(keeps * values[-1] + (1 - keeps**2) ** 0.5 * step)
    return np.array(values)


def saw_tooth(period_s: float, phase: float) -> Series:
    return (SOAK / period_s + phase) % 1.0


def test_a_line_has_its_slope_and_no_error() -> None:
    found = growth(35 * MB + LEAK * SOAK)
    assert found.slope is not None and found.judged and found.grows
    assert found.slope.bytes_per_hour == pytest.approx(3600 * LEAK, rel=1e-3)
    assert found.slope.error < 1_000
    assert found.seconds == pytest.approx(1200.0, abs=2 * EVERY_S), "after the first third"
    assert not growth(35 * MB - LEAK * SOAK).grows
    assert not growth(np.full(len(SOAK), 35 * MB)).grows


@given(
    st.floats(20.0, 300.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 3.0),
    st.integers(0, 1 << 32),
)
def test_a_leak_is_found_below_saw_teeth_and_noise(
    period_s: float, phase: float, height: float, seed: int
) -> None:
    teeth = height * MB * saw_tooth(period_s, phase)
    rough = 0.2 * MB * noise(seed, alike_s=20.0)
    assert growth(35 * MB + LEAK * SOAK + teeth + rough).grows


@given(st.floats(1.0, 1.5), st.floats(0.0, 1.0))
def test_a_leak_is_found_that_takes_steps(step: float, phase: float) -> None:
    """As a heap grows: by a piece whenever the last one is used up."""
    steps = np.floor(LEAK * SOAK / (step * MB) + phase)
    assert growth(35 * MB + step * MB * steps).grows


@given(st.floats(10.0, 600.0), st.floats(0.0, 1.0), st.floats(0.1, 20.0))
def test_a_saw_tooth_does_not_grow(period_s: float, phase: float, height: float) -> None:
    assert not growth(35 * MB + height * MB * saw_tooth(period_s, phase)).grows


@given(st.floats(0.0, 1800.0), st.floats(0.1, 20.0))
def test_a_single_step_does_not_grow(at_s: float, height: float) -> None:
    """A request that was larger than all before has made room for the next one."""
    assert not growth(35 * MB + height * MB * (at_s < SOAK)).grows


@pytest.mark.parametrize(("alike_s", "most"), [(1.0, 0.01), (20.0, 0.01), (60.0, 0.02)])
def test_noise_seldom_grows(alike_s: float, most: float) -> None:
    """However alike neighbours are. The usual error of a slope would accuse one process in five."""
    seen = [growth(35 * MB + 2 * MB * noise(seed, alike_s=alike_s)).grows for seed in range(400)]
    assert np.mean(seen) <= most


@given(st.integers(0, 1 << 32), st.floats(0.0, 100.0), st.floats(0.1, 10.0))
def test_the_slope_and_its_error_have_the_unit_of_the_series(
    seed: int, size: float, scale: float
) -> None:
    base = 1e6 * noise(seed, alike_s=30.0)
    plain, changed = slope_of(SOAK, base), slope_of(SOAK, scale * base + size * MB)
    assert plain is not None and changed is not None
    assert changed.bytes_per_hour == pytest.approx(scale * plain.bytes_per_hour, abs=10.0)
    assert changed.error == pytest.approx(scale * plain.error, abs=10.0)


@given(st.lists(st.integers(0, len(SOAK) - 1), max_size=20), st.floats(0.1, 100.0))
def test_moments_do_not_count(spikes: list[int], height: float) -> None:
    """A long prompt takes memory, and returns it."""
    sizes = 35 * MB + LEAK * SOAK
    sizes[spikes] += height * MB
    assert growth(sizes).grows
    assert not growth(sizes - LEAK * SOAK).grows


def test_what_is_slow_or_uncertain_is_not_accused() -> None:
    found = growth(35 * MB + LEAK * SOAK)
    slow = 0.9 * MATERIAL_BYTES_PER_HOUR
    for slope, grows in (
        (Slope(slow, 0.0), False),
        (Slope(2 * slow, 0.0), True),
        (Slope(2 * slow, 0.5 * slow), True),
        (Slope(2 * slow, slow), False),
        (None, False),
    ):
        assert replace(found, slope=slope).grows is grows
    assert not replace(found, judged=False).grows


def test_stores_that_fill_in_the_beginning_do_not_count() -> None:
    filling = np.minimum(SOAK, WARM_S)
    assert not growth(filling / WARM_S * 50 * MB).grows
    ends = SOAK[SOAK < WARM_S + SETTLED_S + EVERY_S]
    found = growth(np.minimum(ends, WARM_S) / WARM_S * 50 * MB, ends)
    assert found.judged and not found.grows


def test_the_longest_run_counts_and_a_short_one_is_not_judged() -> None:
    restarted_s = 1200.0
    pids = np.where(restarted_s > SOAK, 1, 2)
    found = growth(np.where(pids == 1, LEAK * SOAK, 50 * MB), SOAK, pids)
    assert found.judged and found.grows, "the run before the restart"
    early = growth(LEAK * SOAK, SOAK, np.where(600.0 > SOAK, 1, np.where(1300.0 > SOAK, 2, 3)))
    assert not early.judged and not early.grows
    assert early.slope is not None, "it is shown all the same"
    few = SOAK[: LEAST_BLOCKS - 1]
    assert growth(LEAK * few, few).slope is None
