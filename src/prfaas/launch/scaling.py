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
from typing import Any, TypeVar

import msgspec

from prfaas.catalog import Catalog, DecodePoint, PrefillPoint, ProfileRecord
from prfaas.catalog.models import GQAGroup, LinearGroup, Model, ModelGroup, WindowGroup
from prfaas.config import Deployment
from prfaas.config.deployment import AdaptiveSection, Cluster, Link, WorkloadSection
from prfaas.config.write import sparse, toml
from prfaas.engine.emulated.pace import Scales, scaled_spec
from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, SlidingWindow

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
        model=msgspec.structs.replace(deployment.model, config=None, kv_dtype=None),
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


def scaled_catalog(deployment: Deployment, catalog: Catalog, spec: KVSpec, scales: Scales) -> str:
    """A catalog file with the deployment's model and profiles, for the scaled deployment."""
    records = []
    for cluster in deployment.clusters:
        record = catalog.profile(
            deployment.model.name, cluster.accelerator, cluster.gpus_per_instance
        )
        assert record is not None, "the deployment has been planned"
        if record not in records:
            records.append(record)
    how = f"times x {scales.time:g}, bytes x {scales.bytes:g}, output x {scales.output:g}"
    model = _model(deployment.model.name, scaled_spec(spec, scales.bytes), how)
    return toml(
        {
            "models": [sparse(model)],
            "profiles": [sparse(_profile(catalog, record, scales, how)) for record in records],
        }
    )


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


def _profile(catalog: Catalog, record: ProfileRecord, scales: Scales, how: str) -> ProfileRecord:
    step = scales.time / scales.output
    points = zip(record.prefill, catalog.prefill_seconds(record), strict=True)
    return msgspec.structs.replace(
        record,
        source=f"{record.source}; {how}",
        prefill=[PrefillPoint(p.new, p.cached, s * scales.time) for p, s in points],
        decode=[DecodePoint(p.batch, p.step_s * step) for p in record.decode],
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
