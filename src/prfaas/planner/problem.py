"""What the planner solves: pools of instances, the paths between them, and the traffic.

A `Problem` is completely resolved: it has no names to look up and no files to read. `build_problem`
makes one from a deployment and the catalog; `baselines` makes others from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.catalog import Catalog, ProfileRecord
from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, Link
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec
from prfaas.planner.profile import (
    DecodeRate,
    DecodeStep,
    PrefillProfile,
    PrefillTime,
    decode_rate,
)
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
    deployment: Deployment, catalog: Catalog, spec: KVSpec, workload: Workload
) -> Problem:
    """The caller resolves `spec` and `workload`, which may come from files."""
    locals_ = deployment.of_kind("pd")
    if len(locals_) > 1:
        raise InputError(
            f"{len(locals_)} pd clusters; only `prfaas plan` takes more than one",
            where="clusters",
            fix="keep one pd cluster and the prfaas clusters that have a link to it",
        )
    return build_problem_at(locals_[0], deployment, catalog, spec, workload)


def build_problem_at(
    local: Cluster, deployment: Deployment, catalog: Catalog, spec: KVSpec, workload: Workload
) -> Problem:
    """The problem of one PD cluster and of the PrfaaS clusters that have a link to it."""
    profile = _record(deployment, catalog, local)
    if not profile.decode:
        raise InputError(
            f"the profile of {deployment.model.name} on {local.accelerator} has no decode points",
            where=f"clusters.{deployment.clusters.index(local)}.accelerator",
            fix="add decode = [{ batch = ..., step_s = ... }] to its [[profiles]] entry",
        )
    steps = [DecodeStep(point.batch, point.step_s) for point in profile.decode]
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
        remotes.append(
            Remote(
                _pool(deployment, catalog, cluster),
                _path(link),
                back=None if back is None else _path(back),
                fabric=None if within is None else _path(within),
            )
        )
    fabric = deployment.link(local.name, local.name)
    return Problem(
        spec=spec,
        workload=workload,
        remotes=tuple(remotes),
        local=Local(
            pool=_pool(deployment, catalog, local),
            decode=decode_rate(steps, deployment.slo.output_tokens_per_s),
            fabric=None if fabric is None else _path(fabric),
            fixed_prefill=local.prefill,
        ),
        fixed_threshold=threshold,
        goal=goal,
    )


def prefill_profile(catalog: Catalog, record: ProfileRecord) -> PrefillProfile:
    seconds = catalog.prefill_seconds(record)
    points = [
        PrefillTime(point.new, point.cached, time_s)
        for point, time_s in zip(record.prefill, seconds, strict=True)
    ]
    return PrefillProfile(points, provenance=record.provenance)


def _path(link: Link) -> Path:
    return Path(bps=link.gbps * 1e9, rtt_s=link.rtt_ms / 1e3)


def _pool(deployment: Deployment, catalog: Catalog, cluster: Cluster) -> Pool:
    record = _record(deployment, catalog, cluster)
    price = catalog.accelerator(cluster.accelerator).usd_per_hour
    return Pool(
        cluster=cluster.name,
        accelerator=cluster.accelerator,
        instances=cluster.instances,
        gpus_per_instance=cluster.gpus_per_instance,
        profile=prefill_profile(catalog, record),
        usd_per_gpu_hour=cluster.usd_per_gpu_hour or (None if price is None else price.value),
    )


def _record(deployment: Deployment, catalog: Catalog, cluster: Cluster) -> ProfileRecord:
    where = f"clusters.{deployment.clusters.index(cluster)}.accelerator"
    try:
        catalog.accelerator(cluster.accelerator)
    except InputError as error:
        raise InputError(error.problem, where=where, fix=error.fix) from None
    model = deployment.model.name
    record = catalog.profile(model, cluster.accelerator, cluster.gpus_per_instance)
    if record is None:
        have = ", ".join(f"{r.gpus} x {r.accelerator}" for r in catalog.profiles_of(model))
        raise InputError(
            f"no profile of {model} on {cluster.gpus_per_instance} x {cluster.accelerator}",
            where=where,
            fix=f"add [[profiles]] to a catalog file and name it in catalog = [...]; "
            f"known for this model: {have or 'none'}",
        )
    return record
