"""The result of a run: one row per request, binned time series, and whether the run was stable.

Times are simulated seconds since the run's start. One definition of TTFT, the planner's:

    arrival ─ wait ─ prefill ─ exposed transfer ─ round trip ─ slot wait ─ one decode step ─ token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from prfaas.scheduler.plan import Plan
from prfaas.scheduler.view import LinkId
from prfaas.sim.results.recording import Recording

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Columns, one row per arrival, in order of arrival. NaN: the event did not happen before the
    end of the run (when every request has ended, or when no event can end the rest)."""

    arrival_s: Array
    first_token_s: Array
    last_token_s: Array
    wait_s: Array  # for a route, for a grant and in the prefill queue; of the last attempt
    prefill_s: Array
    transfer_s: Array  # exposed: from the end of the prefill until the KV is in place, with the RTT
    slot_wait_s: Array  # for a decode slot
    prompt_tokens: Counts
    output_tokens: Counts
    hit_tokens: Counts  # length of the cached prefix after which the prefill resumed
    offloaded: Flags
    retries: Counts  # attempts after the first, each after the loss of a node or link
    # Numbers of clusters in `Result.clusters`; -1 where the request was not served.
    home: Counts  # the PD cluster at which it arrived
    prefill_cluster: Counts
    decode_cluster: Counts

    @property
    def ttft_s(self) -> Array:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Array:
        """Time per output token after the first; 0 for an output of one token."""
        after_first = np.maximum(self.output_tokens - 1, 1)
        return (self.last_token_s - self.first_token_s) / after_first


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Bin k covers [k, k + 1) * bin_s. Queue lengths are those at the start of the bin."""

    bin_s: float
    egress_bits: Mapping[LinkId, Array]  # carried in the bin
    prefill_queue: Mapping[str, Array]  # per cluster: requests waiting for a prefill node
    decode_queue: Array  # requests whose KV is in place, waiting for a slot


class ClusterName(NamedTuple):
    name: str
    kind: Literal["pd", "prfaas"]


class RoleUse(NamedTuple):
    """Utilisation of a role over the measured window (`Result.window_s`)."""

    # A PrfaaS cluster's name, "prefill" or "decode" (of the PD cluster). With several PD clusters,
    # the name of the cluster comes first: "east prefill".
    role: str
    utilisation: float  # busy share; for decode the share of slots taken


class StageBacklog(NamedTuple):
    """The growth of one stage's backlog: whether the stage kept up."""

    # As the planner names them: "pd_p", "pd_d", a PrfaaS cluster, "link <cluster>". With several PD
    # clusters also their names: "pd_p east", "link <cluster> east".
    name: str
    growth_s_per_s: float  # seconds of work that its backlog gained per second of the window


class PlanChange(NamedTuple):
    at_s: float
    plan: Plan


class TimelineSpan(NamedTuple):
    """A period of time on a track (a node or a link) of the timeline."""

    track: str
    name: str
    start_s: float
    end_s: float
    request: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    requests: Requests
    clusters: tuple[ClusterName, ...]  # the PD clusters first
    link_bps: Mapping[LinkId, float]  # of the links of hand-offs, as configured
    series: Series
    roles: tuple[RoleUse, ...]
    stages: tuple[StageBacklog, ...]
    plans: tuple[PlanChange, ...]  # first those that the run began with, one per PD cluster
    copies: int  # of cached prefixes between nodes
    copied_bytes: int
    alone: int  # requests that decode nodes served alone
    alone_s: float  # time for which decode nodes prefilled them, all nodes together
    spans: Sequence[TimelineSpan]  # empty unless the config asked for a timeline
    # The measured window: from the end of the first tenth of arrivals to the last arrival.
    window_s: tuple[float, float]
    recording: Recording | None = None  # None unless the config asked for one

    @property
    def plan_changes(self) -> tuple[PlanChange, ...]:
        """The plans that the long-term loop made."""
        homes = sum(cluster.kind == "pd" for cluster in self.clusters)
        return self.plans[homes:]

    @property
    def throughput_rps(self) -> float:
        """First tokens per second, over the measured window."""
        return self.rate_rps(np.ones(len(self.requests.arrival_s), dtype=bool))

    def goodput_rps(self, ttft_s: Array | float, tpot_s: float) -> float:
        """First tokens per second of requests that met both limits of the service level."""
        rows = self.requests
        return self.rate_rps((rows.ttft_s <= ttft_s) & (rows.tpot_s <= tpot_s * (1 + 1e-9)))

    @property
    def measured(self) -> Flags:
        """Requests that arrived in the measured window and got a first token."""
        rows = self.requests
        start, stop = self.window_s
        inside = (rows.arrival_s >= start) & (rows.arrival_s <= stop)
        return inside & ~np.isnan(rows.first_token_s)

    @property
    def bottleneck(self) -> StageBacklog | None:
        """The stage whose backlog grew most; None if every stage kept up."""
        lagging = [stage for stage in self.stages if stage.growth_s_per_s > KEEPS_UP]
        return max(lagging, key=lambda stage: stage.growth_s_per_s, default=None)

    @property
    def stable(self) -> bool:
        return self.bottleneck is None and not np.isnan(self.requests.first_token_s).any()

    def rate_rps(self, counted: Flags) -> float:
        """First tokens per second of these requests, over the measured window."""
        start, stop = self.window_s
        at = self.requests.first_token_s
        inside = counted & (at >= start) & (at < stop)
        return float(inside.sum()) / (stop - start)


# In runs of some thousand requests, the backlog of a stage at 99% of its capacity may grow by a
# hundredth of a second of work per second by chance. A stage offered 102% gains two hundredths.
KEEPS_UP = 0.01
