"""Scales a deployment down: shorter times, fewer bytes and fewer tokens. Pure.

Emulated engines follow a profile, and a small machine cannot carry a real one's bytes and tokens.
Engines and gateway read one scaled catalog and one scaled deployment, so that the gateway predicts
and plans in the scaled units. Rates become `1 / time` as large.

    seconds          x time          of prefills, round trips, every constant whose name ends in _s
    bytes            x bytes         of the model's state; of caches
    output tokens    x output        one stands for 1 / output of them, and its step takes as long
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from prfaas.catalog import DecodePoint, PrefillPoint, ProfileRecord
from prfaas.catalog.models import GQAGroup, LinearGroup, Model, ModelGroup, WindowGroup
from prfaas.catalog.provenance import Status
from prfaas.config import Deployment
from prfaas.config.deployment import AdaptiveSection, Cluster, Link, WorkloadSection
from prfaas.config.write import sparse, toml
from prfaas.engine.emulated.pace import Scales, scaled_spec
from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, SlidingWindow
from prfaas.planner.problem import Local, Pool, Problem
from prfaas.planner.profile import DecodeStep

S = TypeVar("S", bound=msgspec.Struct)
_BYTE = "float8_e4m3fn"  # one byte per element: geometries in bytes


def scaled_deployment(deployment: Deployment, scales: Scales) -> Deployment:
    """The scaled deployment, without its catalog (see `scaled_catalog`)."""
    clusters = [
        cluster
        if cluster.workload is None
        else msgspec.structs.replace(
            cluster, workload=_workload(cluster.workload, scales, f"clusters.{index}.workload")
        )
        for index, cluster in enumerate(deployment.clusters)
    ]
    slo = deployment.slo
    pace = slo.output_tokens_per_s * scales.output / scales.time
    slo = msgspec.structs.replace(_scale_seconds(slo, scales.time), output_tokens_per_s=pace)
    rules = deployment.scheduler
    adaptive: AdaptiveSection = _scale_seconds(rules.adaptive, scales.time)
    rules = msgspec.structs.replace(
        rules,
        replan=_scale_seconds(rules.replan, scales.time),
        paper=_scale_seconds(rules.paper, scales.time),
        moves=_scale_seconds(rules.moves, scales.time),
        # Seconds per second of prefill, squared.
        adaptive=msgspec.structs.replace(adaptive, patience=adaptive.patience / scales.time),
    )
    gb = deployment.cache.gb_per_node * scales.bytes
    return msgspec.structs.replace(
        deployment,
        # The catalog's model has these bytes, and its times are those of these weights.
        model=msgspec.structs.replace(deployment.model, config=None, kv_dtype=None, weights=None),
        workload=_workload(deployment.workload, scales, "workload"),
        slo=slo,
        clusters=clusters,
        links=[_link(link, scales) for link in deployment.links],
        scheduler=rules,
        cache=msgspec.structs.replace(deployment.cache, gb_per_node=gb),
    )


def smaller_deployment(deployment: Deployment, share: float) -> Deployment:
    """The deployment with this share of its instances, rounded up, and of the bandwidth between its
    clusters. An instance and the fabric of a cluster stay as they are."""

    def smaller(cluster: Cluster) -> Cluster:
        instances = max(2 if cluster.kind == "pd" else 1, math.ceil(cluster.instances * share))
        gpus = instances * cluster.gpus_per_instance
        return msgspec.structs.replace(cluster, gpus=gpus, prefill=None, decode=None)

    links = [
        link
        if link.source == link.target
        else msgspec.structs.replace(link, gbps=link.gbps * share)
        for link in deployment.links
    ]
    clusters = [smaller(cluster) for cluster in deployment.clusters]
    return msgspec.structs.replace(deployment, clusters=clusters, links=links)


def scaled_catalog(name: str, problems: Sequence[Problem], scales: Scales) -> str:
    """A catalog file with the model `name` and the times of every instance, for the scaled
    deployment. They are the times that the problems of its PD clusters are planned with, measured
    or estimated."""
    how = f"times x {scales.time:g}, bytes x {scales.bytes:g}, output x {scales.output:g}"
    records: dict[tuple[str, int], ProfileRecord] = {}
    for problem in problems:  # PD clusters first: an instance of a PrfaaS cluster does not decode
        pool = problem.local.pool
        record = _profile(name, pool, problem.local, scales, how)
        records.setdefault((pool.accelerator, pool.gpus_per_instance), record)
    for pool in (remote.pool for problem in problems for remote in problem.remotes):
        record = _profile(name, pool, None, scales, how)
        records.setdefault((pool.accelerator, pool.gpus_per_instance), record)
    model = _model(name, scaled_spec(problems[0].spec, scales.bytes), how)
    profiles = [sparse(record) for record in records.values()]
    return toml({"models": [sparse(model)], "profiles": profiles})


def _workload(section: WorkloadSection, scales: Scales, where: str) -> WorkloadSection:
    if section.output_tokens is None:
        if scales.output != 1:
            raise InputError(
                "the output lengths of a trace cannot be scaled",
                where=where,
                fix=f"set {where}.output_tokens",
            )
        return section
    return msgspec.structs.replace(section, output_tokens=section.output_tokens * scales.output)


def _scale_seconds(section: S, time: float) -> S:
    """Multiplies every field whose name ends in `_s`."""
    changed: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if field.name.endswith("_s") and not field.name.endswith("_per_s") and value is not None:
            changed[field.name] = value * time
    return msgspec.structs.replace(section, **changed)


def _link(link: Link, scales: Scales) -> Link:
    return msgspec.structs.replace(
        link, gbps=link.gbps * scales.bytes / scales.time, rtt_ms=link.rtt_ms * scales.time
    )


def _profile(name: str, pool: Pool, local: Local | None, scales: Scales, how: str) -> ProfileRecord:
    """The times of an instance as a record; with decode steps for a PD cluster."""
    found, _, source = pool.profile.provenance.partition(": ")
    is_estimate = pool.error is not None
    steps: tuple[DecodeStep, ...] = ()
    if local is not None:
        steps = local.decode.steps
        is_estimate = is_estimate or local.decode_error is not None
        if local.decode_provenance != pool.profile.provenance:
            source = f"{source}; decode steps {local.decode_provenance}"
    longer = scales.time / scales.output
    return ProfileRecord(
        model=name,
        accelerator=pool.accelerator,
        gpus=pool.gpus_per_instance,
        status="estimated" if is_estimate else msgspec.convert(found, Status),
        source=f"{source}; {how}",
        prefill=[
            PrefillPoint(p.new_tokens, p.cached_tokens, p.seconds * scales.time)
            for p in pool.profile.points
        ],
        decode=[DecodePoint(step.batch, step.step_s * longer) for step in steps],
    )


def _model(name: str, spec: KVSpec, how: str) -> Model:
    """A made-up model with one-byte elements, whose groups have these bytes."""
    groups: list[ModelGroup] = []
    for group in spec.groups:
        layers = list(group.layers)
        if isinstance(group, FullAttention | SlidingWindow):
            if group.bytes_per_token < 2:
                raise InputError(
                    "fewer than two bytes per token and layer remain",
                    where="--byte-scale",
                    fix="give a larger one",
                )
            keys = group.bytes_per_token - 1
            if isinstance(group, SlidingWindow):
                groups.append(WindowGroup(layers, 1, keys, 1, group.window))
            else:
                groups.append(GQAGroup(layers, 1, keys, 1))
        else:
            groups.append(LinearGroup(layers, 1, 1, 1, group.state_bytes, 1))
    return Model(
        name=name,
        layers=1 + max(max(group.layers) for group in spec.groups),
        groups=groups,
        status="inferred",
        source=f"{name}, {how}",
        kv_dtype=_BYTE,
        state_dtype=_BYTE,
    )
