"""T_prefill(new, cached) between and beyond measured points; decode throughput under an SLO.

Prefill time grows like a + b l + c l^2 (launches, matrices, attention). A non-negative fit of that
trend serves as the *coordinate* in which the points are interpolated: T(l) = P(trend(l)), with P
a monotone cubic through the points. So the curve passes through every point, never falls, follows
the quadratic between points, and continues as the trend beyond them. `extrapolated` is true for a
query beyond the points, and every report repeats this.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator
from scipy.optimize import nnls

from prfaas.errors import InputError

Array = npt.NDArray[np.float64]


class PrefillTime(NamedTuple):
    new_tokens: int
    cached_tokens: int
    seconds: float


class _Curve:
    """T(new) at one cached length."""

    def __init__(self, points: Sequence[PrefillTime]) -> None:
        points = sorted(points)
        new = np.array([p.new_tokens for p in points], dtype=float)
        seconds = np.array([p.seconds for p in points])
        _require_usable(points)
        self.first, self.last = new[0], new[-1]
        self._fit(new, seconds)
        at_points = self.trend(new)
        if not np.all(np.diff(at_points) > 0):
            # The time is the same at every length, so any rising coordinate is correct.
            self.coefficients = np.array([1.0, 1.0 / new[-1], 0.0])
            at_points = self.trend(new)
        self._low, self._high = at_points[0], at_points[-1]
        self._seconds_low, self._seconds_high = seconds[0], seconds[-1]
        self._through = PchipInterpolator(at_points, seconds)
        self._flat = bool(np.all(seconds == seconds[0]))

    @property
    def quadratic_s(self) -> float:
        """Seconds per token squared: the attention term."""
        return float(self.coefficients[2])

    def trend(self, new: Array) -> Array:
        constant, linear, quadratic = self.coefficients
        return np.asarray(constant + new * (linear + new * quadratic))

    def __call__(self, new: Array) -> Array:
        if self._flat:
            return np.full(np.shape(new), self._seconds_low)
        trend = self.trend(new)
        inside = self._through(np.clip(trend, self._low, self._high))
        below = trend * (self._seconds_low / self._low)
        beyond = trend * (self._seconds_high / self._high)
        return np.where(new < self.first, below, np.where(new > self.last, beyond, inside))

    def _fit(self, new: Array, seconds: Array) -> None:
        scale = new[-1]  # columns of similar size; two points do not determine a quadratic
        powers = range(min(len(new), 3))
        columns = np.stack([(new / scale) ** k for k in powers], axis=1)
        relative, _ = nnls(columns / seconds[:, None], np.ones_like(seconds))
        coefficients = np.zeros(3)
        coefficients[: len(relative)] = relative / scale ** np.arange(len(relative))
        self.coefficients = coefficients


class PrefillProfile:
    """T_prefill of one instance. The points form rows of equal cached length; one row has 0.

    Between rows the time is linear in the cached length, as attention over a prefix is. Without a
    row beyond 0, the attention term that makes T quadratic is charged for the prefix
    (c ((n + k)^2 - k^2) = c n^2 + 2 c n k), and the result is flagged as extrapolated.
    """

    def __init__(self, points: Iterable[PrefillTime], *, provenance: str) -> None:
        self.provenance = provenance
        self._stated = self
        self.points = tuple(sorted(points, key=lambda p: (p.cached_tokens, p.new_tokens)))
        rows: dict[int, list[PrefillTime]] = {}
        for point in self.points:
            rows.setdefault(point.cached_tokens, []).append(point)
        if 0 not in rows:
            raise InputError(
                "the prefill profile has no points at cached = 0",
                fix="measure at least two lengths with nothing cached",
            )
        self._cached = np.array(sorted(rows), dtype=float)
        self._curves = [_Curve(rows[cached]) for cached in sorted(rows)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefillProfile) and self.points == other.points

    def __hash__(self) -> int:
        return hash(self.points)

    @property
    def measured_range(self) -> tuple[int, int]:
        """Shortest and longest new length measured with nothing cached."""
        return int(self._curves[0].first), int(self._curves[0].last)

    @property
    def measured_cached(self) -> int:
        """Longest cached prefix measured."""
        return int(self._cached[-1])

    def marginal_s(self, new_tokens: int, cached_tokens: int) -> float:
        """The time that `new_tokens` after a prefix add, by the fitted trend without its constant
        part, which every prefill pays. This is what a cached prefix is worth."""
        _, linear, quadratic = self._curves[0].coefficients
        total = cached_tokens + new_tokens
        return float(linear * new_tokens + quadratic * (total**2 - cached_tokens**2))

    def seconds(self, new: Array | float, cached: Array | float = 0.0) -> Array:
        new, cached = np.broadcast_arrays(np.asarray(new, float), np.asarray(cached, float))
        base = self._curves[0](new)
        if len(self._curves) == 1:
            return base + 2 * self._curves[0].quadratic_s * new * cached
        # A longer prefix never makes prefill faster: a measured dip between rows is noise.
        rows = np.maximum.accumulate(np.stack([curve(new) for curve in self._curves]), axis=0)
        upper = np.clip(np.searchsorted(self._cached, cached, "right"), 1, len(self._cached) - 1)
        low, high = self._cached[upper - 1], self._cached[upper]
        at_low = np.take_along_axis(rows, (upper - 1)[None], axis=0)[0]
        at_high = np.take_along_axis(rows, upper[None], axis=0)[0]
        return np.asarray(at_low + (at_high - at_low) * (cached - low) / (high - low))

    def paced(self, factor: float) -> PrefillProfile:
        """The profile with every stated time multiplied by `factor`. Factors do not accumulate: the
        base is always the profile as stated."""
        stated = self._stated
        if factor == 1.0:
            return stated
        points = [point._replace(seconds=point.seconds * factor) for point in stated.points]
        made = PrefillProfile(points, provenance=self.provenance)
        made._stated = stated
        return made

    def table(self, max_tokens: int) -> PrefillTable:
        return PrefillTable(self, max_tokens)

    @property
    def cached_rows(self) -> Array:
        """The cached lengths of the rows of points, ascending; between them T is linear."""
        return self._cached

    def extrapolated(
        self, new: Array | float, cached: Array | float = 0.0
    ) -> npt.NDArray[np.bool_]:
        """True where the time comes from the trend and not from points on both sides."""
        new, cached = np.broadcast_arrays(np.asarray(new, float), np.asarray(cached, float))
        first, last = self.measured_range
        return np.asarray((new < first) | (new > last) | (cached > self._cached[-1]))


class PrefillTable:
    """The same T as a lookup table for single prompts: routing calls it for every request, and
    the arithmetic on arrays takes fifty times as long."""

    def __init__(self, profile: PrefillProfile, max_tokens: int) -> None:
        new = np.arange(max_tokens + 1, dtype=float)
        self._profile = profile
        self._max_tokens = max_tokens
        # With one row of points T is still linear in the prefix: two lengths determine it.
        rows = profile.cached_rows if len(profile.cached_rows) > 1 else np.array([0.0, 1.0])
        self._cached: list[float] = rows.tolist()
        self._seconds = [array("d", profile.seconds(new, c).tobytes()) for c in self._cached]

    def seconds(self, new: int, cached: int = 0) -> float:
        if new > self._max_tokens:
            return float(self._profile.seconds(new, cached))
        if cached == 0:
            return self._seconds[0][new]
        rows = self._cached
        upper = min(max(bisect_right(rows, cached), 1), len(rows) - 1)
        low = self._seconds[upper - 1][new]
        share = (cached - rows[upper - 1]) / (rows[upper] - rows[upper - 1])
        return low + (self._seconds[upper][new] - low) * share


class DecodeStep(NamedTuple):
    batch: int
    step_s: float


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """BS_max and T_decode of eq. 5: the operating point of one decode instance."""

    bs_max: int
    t_decode_s: float
    steps: tuple[DecodeStep, ...] = ()  # measured steps, ascending; empty: always t_decode_s

    def step_s(self, batch: int) -> float:
        """The time of one step: linear between measured batches, constant beyond them."""
        if not self.steps:
            return self.t_decode_s
        batches, seconds = zip(*self.steps, strict=True)
        return float(np.interp(batch, batches, seconds))


def decode_rate(steps: Sequence[DecodeStep], output_tokens_per_s: float) -> DecodeRate:
    """The batch of highest throughput at which every request still gets `output_tokens_per_s`.
    Between measured batches the step time is linear. Larger batches are not considered."""
    steps = sorted(steps)
    limit_s = 1 / output_tokens_per_s * (1 + 1e-9)
    batches = np.arange(steps[0].batch, steps[-1].batch + 1)
    step_s = np.interp(batches, [s.batch for s in steps], [s.step_s for s in steps])
    fits = step_s <= limit_s
    if not fits.any():
        best = 1 / float(step_s.min())
        raise InputError(
            f"no measured decode batch gives {output_tokens_per_s:g} tokens/s to a request",
            where="slo.output_tokens_per_s",
            fix=f"the fastest measured step gives {best:.4g}; lower the SLO or add decode points",
        )
    best_index = int(np.argmax(np.where(fits, batches / step_s, 0.0)))
    return DecodeRate(int(batches[best_index]), float(step_s[best_index]), tuple(steps))


def _require_usable(points: Sequence[PrefillTime]) -> None:
    at = f"prefill profile at cached = {points[0].cached_tokens}"
    if len(points) < 2:
        raise InputError(f"{at}: only one point", fix="give at least two lengths")
    for before, after in zip(points, points[1:], strict=False):
        if before.new_tokens == after.new_tokens:
            raise InputError(f"{at}: new = {after.new_tokens} twice", fix="remove one")
        if after.seconds < before.seconds:
            raise InputError(
                f"{at}: {after.new_tokens} tokens take {after.seconds:g} s, less than "
                f"{before.new_tokens} tokens ({before.seconds:g} s)",
                fix="measure again or remove one",
            )
