"""The work that one request of a home brings to each resource on average, for every threshold.

Row k of the arrays is row k of the home's curves: requests of at most `threshold[k]` uncached
tokens stay local. Per request that arrives,

    local_s   seconds of local prefill          (1 - p) T_short
    remote_s  seconds of each PrfaaS cluster    p T_long
    bits      KV on the path                    p S_long

Which rows does a plan have to consider? A row is allowed at a rate if the local prefill instances
bear its `local_s`. Under the exact reading `remote_s` and `bits` are sums over the long requests,
E[T(L); L > t] and E[S(L); L > t], so they only fall as the threshold rises: the largest allowed
threshold leaves the least of everything, and no other row can do better. Under the paper reading
this need not be so: p T(E[L | L > t]) can rise with the threshold, because the short requests that
are removed had lowered the representative length, and T is convex. With T = c l^2, for example,
p T = c E[L; L > t]^2 / p, which rises while t is below half of E[L | L > t]. So `candidates`
compares: where the row of the largest threshold has the least of every kind of work, as it usually
has, it is the only candidate. Otherwise every row is one that has less of some kind than that row.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from prfaas.planner.curves import WorkCurves
from prfaas.planner.equations import eq5_theta_pd_d
from prfaas.planner.network.problem import Home
from prfaas.planner.problem import Local, Remote
from prfaas.planner.profile import PrefillProfile

Rows = npt.NDArray[np.int64]

# Rounding: a stage is not over its capacity by less than this.
TOLERANCE = 1e-12


class ThresholdWork:
    """The arrays of one workload on certain accelerators. Instances and links are no part of it, so
    that problems which differ only in these share it."""

    def __init__(
        self, curves: WorkCurves, local: PrefillProfile, remotes: tuple[PrefillProfile, ...]
    ) -> None:
        self.threshold = curves.cuts.threshold
        self.p = p = curves.cuts.p
        self.local_s = (1 - p) * curves.prefill_short_s(local)
        self.remote_s = [p * curves.prefill_long_s(profile) for profile in remotes]
        self.bits = p * curves.kv_bytes_long * 8
        self.every_kind = np.stack([*self.remote_s, self.bits])
        self._least_so_far = np.minimum.accumulate(self.every_kind, axis=1)
        self._local_rises = bool(np.all(np.diff(self.local_s) >= 0))

    def borne(self, rate_rps: float, n_prefill: int) -> Rows:
        """The rows whose local work the instances bear; ascending, and never empty, because row 0
        has none."""
        limit = n_prefill / rate_rps * (1 + TOLERANCE)
        if self._local_rises:
            return np.arange(int(np.searchsorted(self.local_s, limit, "right")))
        return np.flatnonzero(self.local_s <= limit)

    def undominated(self, rows: Rows) -> Rows:
        """Without rows that have no less of any kind of work than the last of them."""
        last = int(rows[-1])
        work = self.every_kind[:, last]
        if np.all(work <= self._least_so_far[:, last]):
            return rows[-1:]
        less = np.any(self.every_kind[:, rows[:-1]] < work[:, None], axis=0)
        return np.append(rows[:-1][less], last)


class HomeWork:
    """A home at any rate: the split that it needs, and the thresholds that may be best. A split
    that is not fixed has at least `least_prefill` prefill instances."""

    def __init__(self, home: Home, work: ThresholdWork, least_prefill: int = 0) -> None:
        self.home = home
        self.work = work
        self.least_prefill = least_prefill
        self.decode_rps = _decode_rps(home.problem.local, home.problem.workload.output_tokens)
        self._fixed_row: int | None = None
        if not self.remotes:
            self._fixed_row = len(work.threshold) - 1
        elif home.problem.fixed_threshold is not None:
            # The row that cuts the same way: the longest length that still stays local.
            place = np.searchsorted(work.threshold, home.problem.fixed_threshold, "right")
            self._fixed_row = int(place) - 1

    @property
    def local(self) -> Local:
        return self.home.problem.local

    @property
    def remotes(self) -> tuple[Remote, ...]:
        return self.home.problem.remotes

    @property
    def may_prefill(self) -> bool:
        """Whether a split with a prefill instance is possible and not fixed."""
        return self.local.fixed_prefill is None and self.local.pool.instances > 1

    @property
    def most_decode_rps(self) -> float:
        """The rate beyond which no split has enough decode instances."""
        fixed = self.local.fixed_prefill
        return self.decode_limit_rps(self.least_prefill if fixed is None else fixed)

    def decode_limit_rps(self, n_prefill: int) -> float:
        return (self.local.pool.instances - n_prefill) * self.decode_rps

    def prefill_limit_rps(self, n_prefill: int, row: int) -> float:
        """Infinite where no request stays local, even without an instance."""
        local_s = float(self.work.local_s[row])
        return n_prefill / local_s if local_s > 0 else math.inf

    def n_prefill(self, rate_rps: float) -> int | None:
        """What the least sufficient number of decode instances leaves. None: the cluster has too
        few instances to decode at this rate."""
        if rate_rps > self.most_decode_rps * (1 + TOLERANCE):
            return None
        if self.local.fixed_prefill is not None:
            return self.local.fixed_prefill
        n_decode = math.ceil(rate_rps / self.decode_rps * (1 - TOLERANCE))
        return self.local.pool.instances - max(n_decode, 1)

    def candidates(self, rate_rps: float, n_prefill: int) -> Rows | None:
        """The rows among which the best one is, ascending. None: the only allowed threshold leaves
        more local work than the instances bear."""
        if self._fixed_row is None:
            return self.work.undominated(self.work.borne(rate_rps, n_prefill))
        limit = self.prefill_limit_rps(n_prefill, self._fixed_row)
        if rate_rps > limit * (1 + TOLERANCE):
            return None
        return np.array([self._fixed_row])


def _decode_rps(local: Local, output_tokens: float) -> float:
    """Requests per second of one decode instance."""
    decode = local.decode
    return eq5_theta_pd_d(1, decode.bs_max, decode.t_decode_s, output_tokens)
