"""A run per cluster and per link. Every figure covers the measured window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas.sim.results.result import Array, Result
from prfaas.sim.results.service_level import ServiceLevel


@dataclass(frozen=True, slots=True)
class PdClusterSummary:
    """The requests that arrived at one PD cluster, wherever they were served."""

    cluster: str
    requests: int
    arrivals_rps: float
    throughput_rps: float  # first tokens
    goodput_rps: float
    ttft_mean_s: float
    ttft_p90_s: float
    offload_fraction: float
    decoded_elsewhere: float  # share of the requests that another PD cluster decoded
    unanswered: int
    prefill_utilisation: float | None  # None: the cluster never had such an instance
    decode_utilisation: float | None


@dataclass(frozen=True, slots=True)
class PrfaasClusterSummary:
    cluster: str
    prefills_rps: float  # of requests with a first token in the window, as `throughput_rps`
    utilisation: float


@dataclass(frozen=True, slots=True)
class LinkSummary:
    """A link over which KV is handed off."""

    source: str
    target: str
    prefills_rps: float
    gbps: float  # mean
    peak_gbps: float  # of the busiest second
    capacity_gbps: float

    @property
    def utilisation(self) -> float:
        return self.gbps / self.capacity_gbps


def summarise_pd_clusters(result: Result, level: ServiceLevel) -> tuple[PdClusterSummary, ...]:
    rows, measured = result.requests, result.measured
    start_s, stop_s = result.window_s
    seconds = stop_s - start_s
    busy = {use.role: use.utilisation for use in result.roles}
    good = (rows.ttft_s <= level.ttft_s) & (rows.tpot_s <= level.tpot_s * (1 + 1e-9))
    names = [cluster.name for cluster in result.clusters if cluster.kind == "pd"]
    made = []
    for number, name in enumerate(names):
        here = rows.home == number
        answered = here & measured
        before = "" if len(names) == 1 else f"{name} "
        ttft_s = rows.ttft_s[answered]
        made.append(
            PdClusterSummary(
                cluster=name,
                requests=int(here.sum()),
                arrivals_rps=float((here & (rows.arrival_s >= start_s)).sum()) / seconds,
                throughput_rps=result.rate_rps(here),
                goodput_rps=result.rate_rps(here & good),
                ttft_mean_s=_mean(ttft_s),
                ttft_p90_s=float(np.quantile(ttft_s, 0.9)) if ttft_s.size else np.nan,
                offload_fraction=_mean(rows.offloaded[answered].astype(float)),
                decoded_elsewhere=_mean((rows.decode_cluster[answered] != number).astype(float)),
                unanswered=int(np.isnan(rows.first_token_s[here]).sum()),
                prefill_utilisation=busy.get(f"{before}prefill"),
                decode_utilisation=busy.get(f"{before}decode"),
            )
        )
    return tuple(made)


def summarise_prfaas_clusters(result: Result) -> tuple[PrfaasClusterSummary, ...]:
    busy = {use.role: use.utilisation for use in result.roles}
    return tuple(
        PrfaasClusterSummary(
            cluster.name,
            result.rate_rps(result.requests.prefill_cluster == number),
            busy.get(cluster.name, 0.0),
        )
        for number, cluster in enumerate(result.clusters)
        if cluster.kind == "prfaas"
    )


def summarise_links(result: Result) -> tuple[LinkSummary, ...]:
    rows, series = result.requests, result.series
    numbers = {cluster.name: number for number, cluster in enumerate(result.clusters)}
    start, stop = (int(edge / series.bin_s) for edge in result.window_s)
    made = []
    for (source, target), bps in result.link_bps.items():
        bits = series.egress_bits[source, target][start : max(stop, start + 1)]
        gbps = bits / series.bin_s / 1e9
        used = rows.prefill_cluster == numbers[source]
        used &= rows.decode_cluster == numbers[target]
        peak = float(gbps.max(initial=0.0))
        rps = result.rate_rps(used)
        made.append(LinkSummary(source, target, rps, _mean(gbps), peak, bps / 1e9))
    return tuple(made)


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else np.nan
