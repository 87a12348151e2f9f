"""A run in a few numbers: what `prfaas simulate` prints and benchmarks compare.

Every figure covers the measured window, so that start and end of the run do not count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prfaas.sim.results.clusters import (
    LinkSummary,
    PdClusterSummary,
    PrfaasClusterSummary,
    summarise_links,
    summarise_pd_clusters,
    summarise_prfaas_clusters,
)
from prfaas.sim.results.result import Result
from prfaas.sim.results.service_level import ServiceLevel

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TtftSpread:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Array) -> TtftSpread:
        """NaN without values: a run without a single first token has no TTFT."""
        if not values.size:
            return cls(np.nan, np.nan, np.nan, np.nan)
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
        return cls(float(values.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class MeanAndPeak:
    mean: float
    peak: float


@dataclass(frozen=True, slots=True)
class LaggingStage:
    """A stage that did not keep up, and the seconds of work that its backlog gained per second."""

    stage: str
    growth_s_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    requests: int
    throughput_rps: float
    goodput_rps: float
    ttft_s: TtftSpread
    ttft_without_queueing_s: TtftSpread  # less the waits for a prefill node and a decode slot
    wait_s: float  # mean, for a prefill node
    tpot_s: float  # mean
    egress_gbps: MeanAndPeak
    offload_fraction: float
    hit_rate: float  # share of prompt tokens that were cached where they were prefilled
    copied_gb: float  # cached prefixes copied between nodes
    utilisation: dict[str, float]
    plan_changes: int
    stable: bool
    behind: LaggingStage | None
    pd_clusters: tuple[PdClusterSummary, ...]
    prfaas_clusters: tuple[PrfaasClusterSummary, ...]
    links: tuple[LinkSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON has no NaN: a figure that does not exist is null."""
        return {key: _to_json(value) for key, value in asdict(self).items()}


def summarise(result: Result, level: ServiceLevel) -> Summary:
    rows, measured = result.requests, result.measured
    queued = rows.wait_s + rows.slot_wait_s
    lagging = result.bottleneck
    prompt_tokens = int(rows.prompt_tokens[measured].sum())
    return Summary(
        requests=len(rows.arrival_s),
        throughput_rps=result.throughput_rps,
        goodput_rps=result.goodput_rps(level.ttft_s, level.tpot_s),
        ttft_s=TtftSpread.of(rows.ttft_s[measured]),
        ttft_without_queueing_s=TtftSpread.of((rows.ttft_s - queued)[measured]),
        wait_s=_mean(rows.wait_s[measured]),
        tpot_s=_mean(rows.tpot_s[measured]),
        egress_gbps=_egress(result),
        offload_fraction=_mean(rows.offloaded[measured].astype(float)),
        hit_rate=int(rows.hit_tokens[measured].sum()) / prompt_tokens if prompt_tokens else np.nan,
        copied_gb=result.copied_bytes / 1e9,
        utilisation={use.role: use.utilisation for use in result.roles},
        plan_changes=len(result.plan_changes),
        stable=result.stable,
        behind=None if lagging is None else LaggingStage(lagging.name, lagging.growth_s_per_s),
        pd_clusters=summarise_pd_clusters(result, level),
        prfaas_clusters=summarise_prfaas_clusters(result),
        links=summarise_links(result),
    )


def _egress(result: Result) -> MeanAndPeak:
    """The sum over all links out of PrfaaS clusters. The peak is the mean of the highest bin."""
    series = result.series
    bits = sum(series.egress_bits.values(), np.zeros(len(series.decode_queue)))
    start, stop = (int(edge / series.bin_s) for edge in result.window_s)
    inside = bits[start : max(stop, start + 1)] / series.bin_s / 1e9
    return MeanAndPeak(_mean(inside), float(inside.max(initial=0.0)))


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else np.nan


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
