"""What prefills, hand-offs and copies cost on this deployment: the numbers that routing compares.

The costs come from the planner's parts, so that a prediction here and the planner's `exact` reading
agree. They are fixed for a deployment, except for the correction of its clusters' profiles
(`scheduler/long_term/profile_correction.py`). Every function is a lookup, because routing calls
them several times per request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from prfaas.planner.problem import Path, Problem
from prfaas.types import ClusterId

PrefillSeconds = Callable[[int, int], float]  # new tokens, cached tokens


@dataclass(frozen=True, slots=True)
class Costs:
    prefill_s: Mapping[
        ClusterId, PrefillSeconds
    ]  # as observed: the stated time multiplied by the pace
    stated_s: Mapping[ClusterId, PrefillSeconds]  # as the profiles state
    paces: Mapping[ClusterId, float]  # observed over stated time, where not 1
    bytes_per_token: int
    closing_bytes: Callable[[int], float]  # of windows and states, by prompt length
    fabric: Mapping[ClusterId, Path]  # network within a cluster, per node
    t_decode_s: float
    mean_hold_s: float  # mean time for which a request takes a decode slot

    def fabric_bps(self, cluster: ClusterId) -> float:
        """Bandwidth per node within the cluster. Infinite where no fabric is stated: local
        transfers then cost nothing, as in planning."""
        path = self.fabric.get(cluster)
        return math.inf if path is None else path.bps

    def paced(self, paces: Mapping[ClusterId, float]) -> Costs:
        """The same costs with prefill times corrected by `paces`."""
        times = {
            cluster: _scale(stated_s, paces.get(cluster, 1.0))
            for cluster, stated_s in self.stated_s.items()
        }
        return replace(self, prefill_s=times, paces=paces)

    def handoff_bytes(self, prompt_tokens: int, transfer_tokens: int) -> int:
        return int(transfer_tokens * self.bytes_per_token + self.closing_bytes(prompt_tokens))

    def exposed_s(
        self, prompt_tokens: int, transfer_tokens: int, prefill_s: float, bps: float
    ) -> float:
        """The part of a hand-off that remains when the prefill ends (`planner/latency.py`)."""
        growing_s = transfer_tokens * self.bytes_per_token * 8 / bps
        return max(growing_s - prefill_s, 0.0) + self.closing_bytes(prompt_tokens) * 8 / bps


def _scale(stated_s: PrefillSeconds, factor: float) -> PrefillSeconds:
    if factor == 1.0:
        return stated_s
    return lambda new_tokens, cached_tokens: factor * stated_s(new_tokens, cached_tokens)


def build_costs(problem: Problem, max_tokens: int) -> Costs:
    """`max_tokens`: prefill times up to this length are tabulated, longer ones are computed."""
    tables = {pool.profile: pool.profile.table(max_tokens) for pool in problem.pools}
    local = problem.local
    fabrics = [(remote.pool, remote.fabric) for remote in problem.remotes]
    fabrics.append((local.pool, local.fabric))
    # Windows are full after a few hundred or thousand tokens; after that the size is constant.
    short = problem.spec.closing_bytes(np.arange(problem.spec.window_tokens + 1.0)).tolist()

    def closing_bytes(tokens: int) -> float:
        return float(short[tokens] if tokens < len(short) else short[-1])

    stated_s = {ClusterId(p.cluster): tables[p.profile].seconds for p in problem.pools}
    return Costs(
        prefill_s=stated_s,
        stated_s=stated_s,
        paces={},
        bytes_per_token=problem.spec.bytes_per_token,
        closing_bytes=closing_bytes,
        fabric={ClusterId(p.cluster): path for p, path in fabrics if path is not None},
        t_decode_s=local.decode.t_decode_s,
        mean_hold_s=local.decode.t_decode_s * problem.workload.output_tokens,
    )
