"""What a run leaves behind: one row per request, binned time series, the verdict on stability.

Times are simulated seconds since the run's start. One definition of TTFT, the planner's:

    arrival ─ wait ─ prefill ─ exposed transfer ─ round trip ─ slot wait ─ one decode step ─ token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prfaas.scheduler.plan import Plan
from prfaas.scheduler.view import LinkId

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Columns, one row per arrival, in order of arrival. NaN: did not happen before the run's end
    (it ends when every request has its last token, or nothing can happen any more)."""

    arrival_s: Array
    first_token_s: Array
    last_token_s: Array
    wait_s: Array  # for a grant and in the prefill queue; of the last attempt
    prefill_s: Array
    transfer_s: (
        Array  # exposed: from the prefill's end until the KV is in place, round trip counted
    )
    slot_wait_s: Array  # for a decode slot
    prompt_tokens: Counts
    output_tokens: Counts
    hit_tokens: Counts  # the prefill resumed after so many
    offloaded: Flags
    retries: Counts  # prefills begun again after a node was lost

    @property
    def ttft_s(self) -> Array:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Array:
        """Time per output token after the first; 0 for answers of one token."""
        after_first = np.maximum(self.output_tokens - 1, 1)
        return (self.last_token_s - self.first_token_s) / after_first


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Bin k covers [k, k + 1) * bin_s. Queues are as they stood at the bin's start."""

    bin_s: float
    egress_bits: Mapping[LinkId, Array]  # carried in the bin
    prefill_queue: Mapping[str, Array]  # per cluster: requests waiting for a prefill node
    decode_queue: Array  # requests whose KV is in place, waiting for a slot


class RoleUse(NamedTuple):
    """Over the measured window (`Result.window_s`)."""

    role: str  # a PrfaaS cluster's name, "prefill" or "decode" (of the PD cluster)
    utilisation: float  # busy share; of decode: slots taken


class Stage(NamedTuple):
    """One stage's own account of whether it kept up."""

    name: str  # as the planner names them: "pd_p", "pd_d", a PrfaaS cluster, "link <cluster>"
    growth_s_per_s: float  # seconds of work its backlog gained per second of the second half


class PlanChange(NamedTuple):
    at_s: float
    plan: Plan


class Span(NamedTuple):
    """A stretch of time on a track (a node, a link), for a timeline."""

    track: str
    name: str
    start_s: float
    end_s: float
    request: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    requests: Requests
    series: Series
    roles: tuple[RoleUse, ...]
    stages: tuple[Stage, ...]
    plans: tuple[PlanChange, ...]  # the first is the plan the run began with
    copies: int  # of cached prefixes between nodes
    copied_bytes: int
    spans: Sequence[Span]  # empty unless the config asked for a timeline
    window_s: tuple[float, float]  # measured: from the first tenth of arrivals to the last arrival

    @property
    def throughput_rps(self) -> float:
        """First tokens per second of the measured window."""
        return self._rate(np.ones(len(self.requests.arrival_s), dtype=bool))

    @property
    def served_rps(self) -> float:
        """Likewise, of requests that also arrived in the measured window. A backlog from before the
        window counts for the throughput of the policy that had built it, and not for this."""
        return self._rate(self.requests.arrival_s >= self.window_s[0])

    def goodput_rps(self, ttft_s: Array | float, tpot_s: float) -> float:
        """First tokens per second of requests that kept both promises."""
        rows = self.requests
        return self._rate((rows.ttft_s <= ttft_s) & (rows.tpot_s <= tpot_s * (1 + 1e-9)))

    @property
    def measured(self) -> Flags:
        """Requests that arrived in the measured window and have an answer."""
        rows = self.requests
        start, stop = self.window_s
        inside = (rows.arrival_s >= start) & (rows.arrival_s <= stop)
        return inside & ~np.isnan(rows.first_token_s)

    @property
    def bottleneck(self) -> Stage | None:
        """The stage that fell behind most; None when every stage kept up."""
        behind = [stage for stage in self.stages if stage.growth_s_per_s > KEEPS_UP]
        return max(behind, key=lambda stage: stage.growth_s_per_s, default=None)

    @property
    def stable(self) -> bool:
        return self.bottleneck is None and not np.isnan(self.requests.first_token_s).any()

    def _rate(self, counted: Flags) -> float:
        start, stop = self.window_s
        at = self.requests.first_token_s
        inside = counted & (at >= start) & (at < stop)
        return float(inside.sum()) / (stop - start)


# A stage at 99% of its capacity gains a hundredth of a second of work per second by chance alone,
# over runs of some thousand requests; a stage offered 102% gains two.
KEEPS_UP = 0.01
