"""Time to first token of a solved deployment, under either reading.

    paper   service + S_kv / B for offloaded requests, only service for local ones: without queue,
            overlap or round trip. Table 6 prints this.
    exact   wait + prefill + exposed transfer + round trip + one decode step

Exposed transfer: the KV of full-attention layers leaves while later tokens are still computed. The
request waits only for what the link cannot carry by the end of the prefill, and for what is final
only then (windows, linear states). Transfers share the link, so each sees B (1 - utilisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prfaas.planner.curves import Array, Atoms
from prfaas.planner.problem import Path, Problem
from prfaas.planner.queueing import Service, Wait, predict_wait
from prfaas.planner.workload import weighted_sum

_BINS = 16_384


class Branch(NamedTuple):
    """Requests that one cluster prefills: their atoms, their share, and the time of each."""

    atoms: slice
    share: float  # of the atoms' weight; several PrfaaS clusters divide the long requests
    seconds: Array  # TTFT without waiting, per selected atom
    wait: Wait | None  # None: no steady state


@dataclass(frozen=True, slots=True)
class TTFT:
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class StageLoad(NamedTuple):
    """Utilisation of a stage; a stage at 1 or more has no steady state."""

    name: str
    utilisation: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The exact reading at one load."""

    load_rps: float
    stages: tuple[StageLoad, ...]
    ttft: TTFT | None  # None where some stage has no steady state
    prefill_wait_mean_s: float | None
    meets_goal: bool | None  # None without a TTFT goal

    @property
    def stable(self) -> bool:
        return all(stage.utilisation < 1 for stage in self.stages)


def paper_ttft(problem: Problem, atoms: Atoms, threshold: int, shares: Sequence[float]) -> TTFT:
    """Service time plus S/B, over the distribution of lengths."""
    work = problem.workload
    short, long = work.divided(threshold)
    branches = [(work.weight[short], atoms.prefill_s(problem.local.pool.profile)[short])]
    kv_bits = atoms.kv_bytes[long] * 8
    for remote, share in zip(problem.remotes, shares, strict=True):
        prefill_s = atoms.prefill_s(remote.pool.profile)[long]
        branches.append((work.weight[long] * share, prefill_s + kv_bits / remote.path.bps))
    weight = np.concatenate([w for w, _ in branches])
    seconds = np.concatenate([s for _, s in branches])
    order = np.argsort(seconds, kind="stable")  # each branch is sorted already, so this is a merge
    cumulative = np.cumsum(weight[order])
    cumulative /= cumulative[-1]

    def quantile(q: float) -> float:
        return float(seconds[order[np.searchsorted(cumulative, q)]])

    mean = weighted_sum(seconds, weight) / float(weight.sum())
    return TTFT(mean, quantile(0.5), quantile(0.9), quantile(0.99))


def predict(
    problem: Problem,
    atoms: Atoms,
    threshold: int,
    n_prefill: int,
    shares: Sequence[float],
    load_rps: float,
) -> Prediction:
    """The exact reading of one deployment at one load."""
    work, local = problem.workload, problem.local
    decode = local.decode
    short, long = work.divided(threshold)
    branches: list[Branch] = []
    stages: list[StageLoad] = []

    if work.new[short].size:
        prefill_s = atoms.prefill_s(local.pool.profile)[short]
        handoff_s = _exposed_s(atoms, short, prefill_s, local.fabric, utilisation=0.0)
        rate = load_rps * float(work.weight[short].sum())
        service = Service.of(prefill_s, work.weight[short])
        stages.append(StageLoad("pd_p", _load(rate, service.mean_s, n_prefill)))
        wait = predict_wait(rate, n_prefill, service) if n_prefill else None
        branches.append(Branch(short, 1.0, prefill_s + handoff_s + decode.t_decode_s, wait))

    if work.new[long].size:
        offloaded = float(work.weight[long].sum())
        mean_kv_bytes = weighted_sum(atoms.kv_bytes[long], work.weight[long]) / offloaded
        for remote, share in zip(problem.remotes, shares, strict=True):
            prefill_s = atoms.prefill_s(remote.pool.profile)[long]
            rate = load_rps * share * offloaded
            service = Service.of(prefill_s, work.weight[long])
            name = remote.pool.cluster
            link_load = rate * mean_kv_bytes * 8 / remote.path.bps
            stages.append(StageLoad(name, _load(rate, service.mean_s, remote.pool.instances)))
            stages.append(StageLoad(f"link {name}", link_load))
            if link_load < 1:
                transfer_s = _exposed_s(atoms, long, prefill_s, remote.path, link_load)
                wait = predict_wait(rate, remote.pool.instances, service)
                seconds = prefill_s + transfer_s + remote.path.rtt_s + decode.t_decode_s
                branches.append(Branch(long, share, seconds, wait))

    slots = (local.pool.instances - n_prefill) * decode.bs_max
    hold = Service.from_cv2(decode.t_decode_s * work.output_tokens, work.output_cv2)
    stages.append(StageLoad("pd_d", _load(load_rps, hold.mean_s, slots)))
    if any(stage.utilisation >= 1 for stage in stages):
        meets = None if problem.goal is None else False
        return Prediction(load_rps, tuple(stages), None, None, meets)

    slot_wait = predict_wait(load_rps, slots, hold)
    assert slot_wait is not None, "every stage is stable"
    distribution = _Distribution(problem, branches, slot_wait)
    meets = None
    if problem.goal is not None:
        meets = distribution.quantile(problem.goal.quantile) <= problem.goal.ttft_s
    return Prediction(
        load_rps, tuple(stages), distribution.summary(), distribution.prefill_wait_mean_s, meets
    )


def _load(rate_rps: float, service_s: float, servers: int) -> float:
    return rate_rps * service_s / servers if servers else np.inf


def _exposed_s(
    atoms: Atoms,
    chosen: slice,
    prefill_s: Array,
    path: Path | None,
    utilisation: float,
) -> Array:
    if path is None:
        return np.zeros_like(prefill_s)
    bps = path.bps * (1 - utilisation)
    growing_s = atoms.growing_bytes[chosen] * 8 / bps
    return np.maximum(growing_s - prefill_s, 0.0) + atoms.closing_bytes[chosen] * 8 / bps


class _Distribution:
    """Distribution of TTFT over all branches, on a grid: service times convolved with waits."""

    def __init__(self, problem: Problem, branches: Sequence[Branch], slot_wait: Wait) -> None:
        weight = problem.workload.weight
        # The grid covers all but the longest 0.05% of requests, so that a few giants do not make it
        # coarse.
        usual = int(np.searchsorted(np.cumsum(weight), 1 - 5e-4)) + 1
        longest = max(
            float(branch.seconds[: max(1, usual - branch.atoms.start)].max()) for branch in branches
        )
        waits = [branch.wait for branch in branches if branch.wait is not None]
        tail = max(_far_tail_s(wait) for wait in (*waits, slot_wait))
        self._edges = np.linspace(0.0, longest + 2 * tail, _BINS + 1)
        mass = np.zeros(_BINS)
        self.prefill_wait_mean_s = 0.0
        self._mean_s = slot_wait.mean_s
        for branch in branches:
            assert branch.wait is not None, "every stage is stable"
            atoms = weight[branch.atoms] * branch.share
            total = float(atoms.sum())
            self.prefill_wait_mean_s += total * branch.wait.mean_s
            self._mean_s += weighted_sum(branch.seconds, atoms) + total * branch.wait.mean_s
            on_grid = np.minimum(branch.seconds, self._edges[-1])
            service, _ = np.histogram(on_grid, bins=self._edges, weights=atoms)
            mass += _sum_of(service, self._wait_mass(branch.wait))
        if slot_wait.p_wait > 1e-9:
            mass = _sum_of(mass, self._wait_mass(slot_wait))
        self._cumulative = np.cumsum(np.maximum(mass, 0.0))
        self._cumulative /= self._cumulative[-1]

    def summary(self) -> TTFT:
        p50, p90, p99 = (self.quantile(q) for q in (0.5, 0.9, 0.99))
        return TTFT(self._mean_s, p50, p90, p99)

    def quantile(self, q: float) -> float:
        return float(np.interp(q, self._cumulative, self._edges[1:]))

    def _wait_mass(self, wait: Wait) -> Array:
        # Bin k holds waits within half a bin of k bins, so that "no wait" shifts nothing.
        width = self._edges[1]
        exceeds = wait.exceeds(width * (np.arange(_BINS) + 0.5))
        return np.concatenate([[1 - exceeds[0]], exceeds[:-1] - exceeds[1:]])


def _sum_of(first: Array, second: Array) -> Array:
    """The distribution of a sum of two independent times: a convolution by Fourier transform."""
    spectrum = np.fft.rfft(first, 2 * _BINS) * np.fft.rfft(second, 2 * _BINS)
    return np.fft.irfft(spectrum, 2 * _BINS)[:_BINS]


def _far_tail_s(wait: Wait) -> float:
    """A wait that hardly any request exceeds."""
    return wait.p_wait and wait.scale_s * (wait.shape + 12 * max(1.0, wait.shape**0.5))
