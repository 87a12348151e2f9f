"""The work that one arriving request brings to each stage, for every threshold at once.

Rows are those of the planner's curves: row 0 offloads everything, the last row nothing. All means
are exact (E[T(L)], not T(E[L])). With work per arriving request, equations 3 to 6 are

    Lambda_max = min(N_prfaas / long_s, B / long_bits, N_p / short_s, N_d * decode_rps)

and every term is monotone in the row: that is what the search uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prfaas.advisor.market import Array, Build
from prfaas.kvspec import KVSpec
from prfaas.planner.curves import Atoms, cut_workload
from prfaas.planner.optimise import LOCAL_PREFILL_SHARE
from prfaas.planner.profile import DecodeRate
from prfaas.planner.workload import Workload

# Thresholds that the search compares. Neighbouring lengths share an atom; with this many the rates
# differ from those of one atom per token by about 0.1% (a test).
ATOMS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class BuildWork:
    """Seconds of one instance per arriving request, for every threshold."""

    short_s: Array  # of the requests that stay local; never falls
    long_s: Array  # of the offloaded requests; never rises
    decode_rps: float  # requests per second that one instance decodes; 0: it cannot

    @property
    def all_s(self) -> float:
        return float(self.short_s[-1])

    def slower(self, prefill: float, decode_rps: float) -> BuildWork:
        """The work with every prefill time multiplied by a factor, and another decode rate."""
        return BuildWork(self.short_s * prefill, self.long_s * prefill, decode_rps)


class TrafficWork:
    """The work of one workload; that of each build is computed once."""

    def __init__(self, workload: Workload, spec: KVSpec) -> None:
        self.workload = workload
        self.atoms = Atoms(workload, spec)
        self.cuts = cut_workload(workload)
        self.long_bits = self._above(self.atoms.kv_bytes * 8)
        self._builds: dict[Build, BuildWork] = {}

    def of(self, build: Build) -> BuildWork:
        if build not in self._builds:
            seconds = self.atoms.prefill_s(build.profile)
            self._builds[build] = BuildWork(
                self._below(seconds), self._above(seconds), self.decode_rps(build.decode)
            )
        return self._builds[build]

    def decode_rps(self, decode: DecodeRate | None) -> float:
        if decode is None:
            return 0.0
        return decode.bs_max / (decode.t_decode_s * self.workload.output_tokens)

    def _below(self, values: Array) -> Array:
        sums = np.insert(np.cumsum(values * self.workload.weight), 0, 0.0)
        return np.asarray(sums[self.cuts.first_long])

    def _above(self, values: Array) -> Array:
        sums = np.append(np.cumsum((values * self.workload.weight)[::-1])[::-1], 0.0)
        return np.asarray(sums[self.cuts.first_long])


def coarsened(workload: Workload, atoms: int = ATOMS) -> Workload:
    """The workload with at most about `atoms` atoms: lengths that differ by less than a small ratio
    become one of their mean. Lengths stay whole numbers, as thresholds are."""
    if len(workload.new) <= atoms:
        return workload
    low, high = np.log(workload.new[0]), np.log(workload.new[-1])
    cell = np.floor((np.log(workload.new) - low) / max(high - low, 1e-12) * atoms)
    # Short lengths are farther apart than a cell is wide: each keeps an atom of its own.
    first = np.flatnonzero(np.diff(cell, prepend=-1.0) > 0)
    weight = np.add.reduceat(workload.weight, first)
    kept = weight > 0
    new = np.add.reduceat(workload.new * workload.weight, first)[kept] / weight[kept]
    cached = np.add.reduceat(workload.cached * workload.weight, first)[kept] / weight[kept]
    return Workload(
        np.maximum.accumulate(np.round(new)),
        cached,
        weight[kept] / weight[kept].sum(),
        workload.output_tokens,
        workload.output_cv2,
    )


class PairRate(NamedTuple):
    """Lambda_max of a PD and a PrfaaS cluster with the split that the planner chooses."""

    rps: float
    local_prefill: bool  # a local instance prefills

    @property
    def worth(self) -> float:
        return worth(self.rps, self.local_prefill)


def worth(rps: float, local_prefill: bool) -> float:
    """What rates are compared by: one with local prefill is worth as much as a slightly larger one
    without it (`optimise` prefers the same)."""
    return rps / LOCAL_PREFILL_SHARE if local_prefill else rps


def prfaas_rate(
    local: BuildWork, remote: BuildWork, long_bits: Array, n_local: int, n_remote: int, bps: float
) -> PairRate:
    """The rate at the best threshold and split; its worth never falls with a number of instances.

    What PrfaaS sustains rises with the row and what local prefill sustains falls, so for every
    number of prefill instances the best row is where the two cross."""
    with np.errstate(divide="ignore"):
        sent = np.minimum(n_remote / remote.long_s, bps / long_bits)
        n_prefill = np.arange(n_local)
        row = np.searchsorted(sent * local.short_s, n_prefill, "right") - 1
        row = np.minimum(row, len(sent) - 2)
        produced = np.maximum(sent[row], n_prefill / local.short_s[row + 1])
    rates = np.minimum(produced, (n_local - n_prefill) * local.decode_rps)
    without, some = float(rates[0]), float(rates[1:].max(initial=0.0))
    if some > 0 and worth(some, True) >= without:
        return PairRate(some, local_prefill=True)
    return PairRate(without, local_prefill=False)


def single_rate(local: BuildWork, instances: int) -> float:
    """Lambda_max of one PD cluster without a remote one; 0 with fewer than two instances."""
    n_prefill = np.arange(1, max(instances, 1))
    if not n_prefill.size:
        return 0.0
    decode = (instances - n_prefill) * local.decode_rps
    return float(np.minimum(n_prefill / local.all_s, decode).max())
