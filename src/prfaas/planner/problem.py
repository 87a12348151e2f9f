"""What the planner solves: pools of instances, the paths between them, and the traffic.

A `Problem` is completely resolved: it has no names to look up and no files to read. `build_problem`
makes one from a deployment and the catalog; `baselines` makes others from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.catalog import Catalog
from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, Link
from prfaas.errors import InputError
from prfaas.estimator.uncertainty import EstimateError
from prfaas.kvspec import KVSpec
from prfaas.planner.instance_times import InstanceTimes, TimesFinder
from prfaas.planner.profile import DecodeRate, PrefillProfile, decode_rate
from prfaas.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal instances of one cluster."""

    cluster: str
    accelerator: str
    instances: int
    gpus_per_instance: int
    profile: PrefillProfile
    usd_per_gpu_hour: float | None
    error: EstimateError | None = None  # of the profile; None: it is not estimated

    @property
    def gpus(self) -> int:
        return self.instances * self.gpus_per_instance


@dataclass(frozen=True, slots=True)
class Path:
    """A network path. Between clusters, all transfers share its bandwidth. Within a cluster, each
    node has this bandwidth."""

    bps: float
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Remote:
    """A PrfaaS cluster and its path to the local PD cluster."""

    pool: Pool
    path: Path
    back: Path | None = None  # from the PD cluster, for copies of cached prefixes
    fabric: Path | None = None  # within the cluster; None: transfers within it cost nothing


@dataclass(frozen=True, slots=True)
class Local:
    """The PD cluster: its instances prefill or decode."""

    pool: Pool
    decode: DecodeRate
    fabric: Path | None  # None: local hand-offs cost nothing
    fixed_prefill: int | None  # None: the planner chooses the split
    decode_error: EstimateError | None = None  # None: decode steps are not estimated
    decode_provenance: str = ""
    output_tokens_per_s: float | None = None  # the SLO that `decode` was chosen for


@dataclass(frozen=True, slots=True)
class LatencyGoal:
    ttft_s: float
    quantile: float


@dataclass(frozen=True, slots=True)
class Problem:
    spec: KVSpec
    workload: Workload
    remotes: tuple[Remote, ...]
    local: Local
    fixed_threshold: int | None = None
    goal: LatencyGoal | None = None

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (*(remote.pool for remote in self.remotes), self.local.pool)


def build_problem(
    deployment: Deployment, catalog: Catalog, spec: KVSpec, workload: Workload, times: TimesFinder
) -> Problem:
    """The caller resolves `spec`, `workload` and `times`, which may come from files."""
    locals_ = deployment.of_kind("pd")
    if len(locals_) > 1:
        raise InputError(
            f"{len(locals_)} pd clusters, and this command takes one",
            where="clusters",
            fix="keep one pd cluster and the prfaas clusters that have a link to it",
        )
    return build_problem_at(locals_[0], deployment, catalog, spec, workload, times)


def build_problem_at(
    local: Cluster,
    deployment: Deployment,
    catalog: Catalog,
    spec: KVSpec,
    workload: Workload,
    times: TimesFinder,
) -> Problem:
    """The problem of one PD cluster and of the PrfaaS clusters that have a link to it."""
    goal = None
    if deployment.slo.ttft_s is not None:
        goal = LatencyGoal(deployment.slo.ttft_s, deployment.slo.ttft_quantile)
    threshold = deployment.scheduler.threshold_tokens
    if threshold is not None and threshold > workload.max_new_tokens:
        raise InputError(
            f"{threshold} is above the longest prompt ({workload.max_new_tokens} uncached tokens)",
            where="scheduler.threshold_tokens",
            fix="lower it",
        )
    remotes = []
    for cluster in deployment.of_kind("prfaas"):
        link = deployment.link(cluster.name, local.name)
        if link is None:
            continue
        back = deployment.link(local.name, cluster.name)
        within = deployment.link(cluster.name, cluster.name)
        found = _times(deployment, times, cluster, decode=False)
        remotes.append(
            Remote(
                _pool(catalog, cluster, found),
                _path(link),
                back=None if back is None else _path(back),
                fabric=None if within is None else _path(within),
            )
        )
    fabric = deployment.link(local.name, local.name)
    found = _times(deployment, times, local, decode=True)
    slo = deployment.slo.output_tokens_per_s
    return Problem(
        spec=spec,
        workload=workload,
        remotes=tuple(remotes),
        local=Local(
            pool=_pool(catalog, local, found),
            decode=_decode_rate(found, slo),
            fabric=None if fabric is None else _path(fabric),
            fixed_prefill=local.prefill,
            decode_error=found.decode_error,
            decode_provenance=found.decode_provenance,
            output_tokens_per_s=slo,
        ),
        fixed_threshold=threshold,
        goal=goal,
    )


def _path(link: Link) -> Path:
    return Path(bps=link.gbps * 1e9, rtt_s=link.rtt_ms / 1e3)


def _pool(catalog: Catalog, cluster: Cluster, times: InstanceTimes) -> Pool:
    price = catalog.accelerator(cluster.accelerator).usd_per_hour
    return Pool(
        cluster=cluster.name,
        accelerator=cluster.accelerator,
        instances=cluster.instances,
        gpus_per_instance=cluster.gpus_per_instance,
        profile=times.prefill,
        usd_per_gpu_hour=cluster.usd_per_gpu_hour or (None if price is None else price.value),
        error=times.prefill_error,
    )


def _decode_rate(times: InstanceTimes, output_tokens_per_s: float) -> DecodeRate:
    try:
        return decode_rate(times.decode, output_tokens_per_s)
    except InputError:
        if times.decode_error is None:
            raise
        fastest = min(times.decode, key=lambda step: step.step_s)
        raise InputError(
            f"no decode batch gives {output_tokens_per_s:g} tokens/s to a request: the fastest "
            f"estimated step, of batch {fastest.batch}, gives {1 / fastest.step_s:.4g}",
            where="slo.output_tokens_per_s",
            fix="lower the SLO, use more GPUs per instance, or use another accelerator",
        ) from None


def _times(
    deployment: Deployment, times: TimesFinder, cluster: Cluster, *, decode: bool
) -> InstanceTimes:
    try:
        return times.times(cluster.accelerator, cluster.gpus_per_instance, decode=decode)
    except InputError as error:
        if error.file is not None:  # the error is in the model's config.json
            raise
        where = f"clusters.{deployment.clusters.index(cluster)}"
        raise InputError(error.problem, where=f"{where}.accelerator", fix=error.fix) from None
