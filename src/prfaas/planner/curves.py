"""Every stage's mean work as a function of the threshold, under either reading of the model.

Row k of the curves cuts the workload: requests of at most `threshold[k]` uncached tokens stay
local. Row 0 offloads everything, the last row nothing. Between them is every cut that separates two
distinct lengths, so the best row is the best threshold.

    paper   T and S at the representative lengths E[L | L > t] and E[L | L <= t] (section 3.4.1)
    exact   the means E[T(L) | L > t], E[S(L) | L > t], E[T(L) | L <= t] themselves

T is convex, so `paper` understates the work (Jensen). A queue sees the work of `exact`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from prfaas.kvspec import KVSpec
from prfaas.planner.profile import PrefillProfile
from prfaas.planner.workload import Workload

Array: TypeAlias = npt.NDArray[np.float64]
Reading: TypeAlias = Literal["paper", "exact"]


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """The workload cut at every length: shares and conditional means on both sides."""

    workload: Workload
    threshold: npt.NDArray[np.int64]
    first_long: npt.NDArray[np.int64]  # index of the first offloaded atom
    p: Array  # P(L > t)

    def mean_long(self, values: Array) -> Array:
        """E[values | L > t]. Where nothing is offloaded, the limit: the value of the last atom."""
        tail = np.append(np.cumsum((values * self.workload.weight)[::-1])[::-1], 0.0)
        return _ratio(tail[self.first_long], self.p, otherwise=float(values[-1]))

    def mean_short(self, values: Array) -> Array:
        """E[values | L <= t]. Where nothing stays local, the limit: the value of the first atom."""
        head = np.insert(np.cumsum(values * self.workload.weight), 0, 0.0)
        return _ratio(head[self.first_long], 1 - self.p, otherwise=float(values[0]))


def cut_workload(workload: Workload) -> Cuts:
    ends = np.flatnonzero(np.diff(workload.new)) + 1  # where one length's atoms end
    first_long = np.concatenate([[0], ends, [len(workload.new)]]).astype(np.int64)
    threshold = np.concatenate([[0], workload.new[first_long[1:] - 1]]).astype(np.int64)
    tail = np.append(np.cumsum(workload.weight[::-1])[::-1], 0.0)
    p = tail[first_long] / tail[0]
    return Cuts(workload, threshold, first_long, p)


class Atoms:
    """The cost of each request of the workload, computed once and shared by all compared
    deployments and by every point of a sweep."""

    def __init__(self, workload: Workload, spec: KVSpec) -> None:
        self.workload = workload
        self.spec = spec
        self.growing_bytes = spec.growing_bytes(workload.new)
        self.closing_bytes = spec.closing_bytes(workload.new + workload.cached)
        self._prefill_s: dict[PrefillProfile, Array] = {}

    @property
    def kv_bytes(self) -> Array:
        """S_kv of a hand-off to a receiver that holds the cached prefix."""
        return self.growing_bytes + self.closing_bytes

    def prefill_s(self, profile: PrefillProfile) -> Array:
        if profile not in self._prefill_s:
            self._prefill_s[profile] = profile.seconds(self.workload.new, self.workload.cached)
        return self._prefill_s[profile]


class WorkCurves:
    """Mean prefill seconds and KV bytes per request on each side of every cut."""

    def __init__(self, cuts: Cuts, atoms: Atoms, reading: Reading) -> None:
        self.cuts = cuts
        self._atoms = atoms
        self._reading = reading
        self._seconds: dict[tuple[PrefillProfile, bool], Array] = {}
        self.kv_bytes_long = self._kv_bytes_long()

    def prefill_long_s(self, profile: PrefillProfile) -> Array:
        return self._prefill(profile, long=True)

    def prefill_short_s(self, profile: PrefillProfile) -> Array:
        return self._prefill(profile, long=False)

    def _prefill(self, profile: PrefillProfile, *, long: bool) -> Array:
        key = (profile, long)
        if key not in self._seconds:
            mean = self.cuts.mean_long if long else self.cuts.mean_short
            work = self.cuts.workload
            if self._reading == "paper":
                self._seconds[key] = profile.seconds(mean(work.new), mean(work.cached))
            else:
                self._seconds[key] = mean(self._atoms.prefill_s(profile))
        return self._seconds[key]

    def _kv_bytes_long(self) -> Array:
        work, mean, spec = self.cuts.workload, self.cuts.mean_long, self._atoms.spec
        if self._reading == "paper":
            new, cached = mean(work.new), mean(work.cached)
            return spec.growing_bytes(new) + spec.closing_bytes(new + cached)
        return mean(self._atoms.kv_bytes)


def _ratio(numerator: Array, share: Array, *, otherwise: float) -> Array:
    quotient = np.full(share.shape, otherwise)
    np.divide(numerator, share, out=quotient, where=share > 1e-12)
    return quotient
