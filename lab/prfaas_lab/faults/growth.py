"""Decides from samples of memory whether a process grows. Pure.

Of every process the longest run between two restarts counts, and of that run what comes after its
first third and after `WARM_S`, because caches and stores fill. Through this rest goes a line of
least squares; a process grows when the line's slope is beyond its error and material.

    start ── does not count ── max(WARM_S, 1/3) ── slope ± error ── end

Each sample resembles the one before it, so that the usual error of a slope would be far too small.
Here the line goes through the lows of minutes, because what a request takes for a moment is no
growth, and the error is as large as the remaining likeness of neighbours demands. A saw-tooth and a
single step have a large error, a leak has a small one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prfaas_lab.faults.resource_usage import ResourceUsage

WARM, WARM_S = 1 / 3, 600.0  # a kvd that was started again needs ten minutes to fill its stores
BLOCK_S = 60.0  # lows of less rise and fall with the traffic of the moment
LEAST_BLOCKS = 8  # for an error that says anything
SETTLED_S = LEAST_BLOCKS * BLOCK_S  # a shorter rest is not judged
# One process without growth in a few hundred is beyond this, by chance.
ERRORS = 3.0
# Of a process that runs for a month, this makes 0.7 GiB: it ends one whose limit is a GiB. What is
# slower does not end a process before its next upgrade.
MATERIAL_BYTES_PER_HOUR = 1 << 20
_MOST_LIKENESS = 0.9  # nothing is known about the slope of a series whose neighbours are more alike


class Sample(NamedTuple):
    at_s: float
    held: Mapping[str, ResourceUsage]  # by process


@dataclass(frozen=True, slots=True)
class Slope:
    bytes_per_hour: float
    error: float  # its standard error

    def __str__(self) -> str:
        return f"{self.bytes_per_hour / 1e6:+.2f} ± {self.error / 1e6:.2f} MB/h"


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one process between two restarts, in its longest run."""

    seconds: float  # that count
    mean_bytes: int
    slope: Slope | None  # None: too few samples
    judged: bool  # the run was long enough

    @property
    def grows(self) -> bool:
        if not self.judged or self.slope is None:
            return False
        least = max(ERRORS * self.slope.error, MATERIAL_BYTES_PER_HOUR)
        return self.slope.bytes_per_hour > least

    def __str__(self) -> str:
        verdict = "grows" if self.grows else "" if self.judged else "too short to be judged"
        slope = self.slope or "too few samples"
        return (
            f"{self.mean_bytes / 1e6:.1f} MB, {slope} in {self.seconds:.0f} s  {verdict}".rstrip()
        )

    @staticmethod
    def of(samples: Sequence[Sample]) -> dict[str, Growth]:
        """Growth by the name of the process."""
        runs: dict[tuple[str, int], list[tuple[float, int]]] = {}
        for sample in samples:
            for name, one in sample.held.items():
                runs.setdefault((name, one.pid), []).append((sample.at_s, one.own_bytes))
        longest: dict[str, list[tuple[float, int]]] = {}
        for (name, _), run in runs.items():
            if name not in longest or _seconds(run) > _seconds(longest[name]):
                longest[name] = run
        return {name: _growth(run) for name, run in longest.items()}


def slope_of(at_s: npt.ArrayLike, nbytes: npt.ArrayLike) -> Slope | None:
    """The slope of a series, with an error that is honest about neighbours that are alike."""
    times, values = np.asarray(at_s, dtype=float), np.asarray(nbytes, dtype=float)
    if not len(times):
        return None
    count = min(round((times[-1] - times[0]) / BLOCK_S), len(times))
    if count < LEAST_BLOCKS:
        return None
    x = np.array([block.mean() for block in np.array_split(times, count)])
    y = np.array([block.min() for block in np.array_split(values, count)])
    x, y = x - x.mean(), y - y.mean()
    spread = x @ x
    slope = (x @ y) / spread
    rest = y - slope * x
    squares = rest @ rest
    likeness = (rest[1:] @ rest[:-1]) / squares if squares else 0.0
    # The line has followed the series, so that the rest looks less alike than it is (Kendall).
    likeness = (likeness + 2 / count) / (1 - 4 / count)
    likeness = min(max(likeness, 0.0), _MOST_LIKENESS)
    variance = squares / (count - 2) / spread * (1 + likeness) / (1 - likeness)
    return Slope(round(3600 * slope), round(3600 * variance**0.5))


def _growth(run: Sequence[tuple[float, int]]) -> Growth:
    start_s, end_s = run[0][0], run[-1][0]
    third_s = start_s + WARM * (end_s - start_s)
    from_s = max(third_s, start_s + WARM_S)
    judged = end_s - from_s >= SETTLED_S
    counted = [one for one in run if one[0] >= (from_s if judged else third_s)]
    times, sizes = zip(*counted, strict=True)
    slope = slope_of(times, sizes)
    return Growth(round(_seconds(counted), 1), round(sum(sizes) / len(sizes)), slope, judged)


def _seconds(run: Sequence[tuple[float, int]]) -> float:
    return run[-1][0] - run[0][0]
