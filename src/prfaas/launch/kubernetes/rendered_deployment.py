"""Renders a deployment that was prepared: its services, manifests, keys and certificates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from prfaas.config import Deployment
from prfaas.config.deployment import Trace
from prfaas.config.host import KvdSection
from prfaas.errors import InputError
from prfaas.launch.kubernetes.credentials import rotate_keys, write_credentials
from prfaas.launch.kubernetes.options import RenderOptions, RotationStep
from prfaas.launch.kubernetes.pod_places import CONFIG, MODELS
from prfaas.launch.kubernetes.rendering import Rendered, list_services, render_cluster
from prfaas.launch.kubernetes.writing import write_manifests
from prfaas.launch.new_deployment.deployment_file import catalog_files
from prfaas.launch.preparation import LaunchPlan
from prfaas.launch.services.hosts import EngineSpec


def render_deployment(
    folder: Path,
    plan: LaunchPlan,
    options: RenderOptions,
    memory: str | None,
    *,
    renew: bool = False,
    step: RotationStep | None = None,
) -> dict[str, Rendered]:
    """Writes the folder. Raises InputError."""
    deployment, engines, files = in_pods(plan, options, memory)
    services = list_services(deployment, engines, options, files)
    rendered = {
        cluster.name: render_cluster(cluster, services, deployment, engines, options)
        for cluster in deployment.clusters
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if step is not None:
            rotate_keys(folder, step)
        write_manifests(folder, rendered)
        write_credentials(folder, rendered, options, renew=renew)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", file=error.filename or folder
        ) from None
    return rendered


def in_pods(
    plan: LaunchPlan, options: RenderOptions, memory: str | None
) -> tuple[Deployment, EngineSpec, Mapping[str, str]]:
    """The deployment and its engines with the paths of the pods, and the files that they name."""
    deployment, engines = plan.deployment, plan.engines
    sections = [deployment.workload, *(cluster.workload for cluster in deployment.clusters)]
    if any(isinstance(section, Trace) for section in sections):
        raise InputError(
            "a trace does not fit into a ConfigMap",
            where="workload",
            fix="describe its lengths as lognormal or mixture",
        )
    sources = catalog_files(deployment)
    files = {name: path.read_text(encoding="utf-8") for name, path in sources.items()}
    at = options.model_path or f"{MODELS}/{deployment.model.name}"
    model, gateway = deployment.model, deployment.gateway
    if model.config is not None:
        model = msgspec.structs.replace(model, config=f"{at}/config.json")
    if gateway.tokenizer is not None:
        gateway = msgspec.structs.replace(gateway, tokenizer=at)
    deployment = msgspec.structs.replace(
        deployment, model=model, gateway=gateway, catalog=list(files)
    )
    emulated = engines.kind == "emulated"
    tokenizer = Path(at) if engines.tokenizer is not None else None
    engines = replace(
        engines,
        model=engines.model if emulated else at,
        memory=memory or (engines.memory if emulated else KvdSection().memory),
        catalog=[Path(CONFIG) / name for name in files] if emulated else (),
        tokenizer=tokenizer,
        ssd_size=options.ssd_size,
    )
    return deployment, engines, files
