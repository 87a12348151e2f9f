"""The answers of `prfaas init`: options, and questions on a terminal for those that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from prfaas.catalog import Catalog
from prfaas.config import Deployment, load_deployment, parse_deployment
from prfaas.config.strict import parse_toml, read_text
from prfaas.config.write import deployment_toml
from prfaas.errors import InputError
from prfaas.launch.new_deployment.answers import (
    ClusterHosts,
    EngineName,
    Hardware,
    check_clusters,
    parse_cluster,
    parse_per_cluster,
)
from prfaas.launch.new_deployment.deployment_file import (
    LinkSpeed,
    ModelFiles,
    choose_hardware,
    design_deployment,
    extend_deployment,
    with_policy,
)
from prfaas.launch.preparation import with_absolute_paths
from prfaas.planner.problem import Problem
from prfaas.studies.problem_files import Study

DEFAULT_RTT_MS = 20.0


@dataclass(frozen=True, slots=True)
class DeploymentFlags:
    """The options of `prfaas init` that describe a deployment. None and empty: not given."""

    plan: Path | None
    model: str | None
    name: str | None
    model_path: str | None
    catalogs: Sequence[Path]
    engine: EngineName
    local: Sequence[str]
    remote: Sequence[str]
    gateway: str | None
    accelerators: Sequence[str]
    gpus: Sequence[str]
    gbps: float | None
    rtt_ms: float | None
    policy: str | None
    max_tokens: int | None


def ask(flags: DeploymentFlags) -> DeploymentFlags:
    """The flags, with what a person on the terminal answers for the missing ones."""
    changes: dict[str, Any] = {}
    if flags.plan is None and flags.model is None:
        what = "Model of the catalog" if flags.engine == "emulated" else "Checkpoint folder"
        changes["model"] = click.prompt(what)
    if not flags.local and flags.plan is None:
        changes["local"] = (click.prompt("Hosts of the PD cluster, separated by commas"),)
        if not flags.remote:
            text = "Hosts of the PrfaaS cluster (empty: none)"
            answer = click.prompt(text, default="", show_default=False)
            changes["remote"] = (answer,) if answer.strip() else ()
    if flags.plan is not None:
        changes |= _ask_for_planned_hosts(flags, load_deployment(flags.plan))
    if flags.gateway is None and "local" in changes:
        first = parse_cluster(changes["local"][0], "pd").hosts[0]
        changes["gateway"] = click.prompt("Host of the gateway", default=first)
    if flags.plan is None and (changes.get("remote") or flags.remote):
        if flags.gbps is None:
            changes["gbps"] = click.prompt("Gbit/s between the clusters", type=float)
        if flags.rtt_ms is None:
            changes["rtt_ms"] = click.prompt(
                "Round trip between the clusters in ms", type=float, default=DEFAULT_RTT_MS
            )
    return replace(flags, **changes)


def _ask_for_planned_hosts(flags: DeploymentFlags, planned: Deployment) -> dict[str, Any]:
    given = {parse_cluster(text, "pd").name for text in flags.local}
    given |= {parse_cluster(text, "prfaas").name for text in flags.remote}
    found: dict[str, list[str]] = {"pd": list(flags.local), "prfaas": list(flags.remote)}
    for cluster in planned.clusters:
        if cluster.name not in given:
            text = f"Hosts of cluster {cluster.name} ({cluster.kind}), separated by commas"
            found[cluster.kind].append(f"{cluster.name}={click.prompt(text)}")
    return {"local": tuple(found["pd"]), "remote": tuple(found["prfaas"])}


def read_clusters(flags: DeploymentFlags) -> list[ClusterHosts]:
    clusters = [parse_cluster(text, "prfaas") for text in flags.remote]
    clusters += [parse_cluster(text, "pd") for text in flags.local]
    check_clusters(clusters)
    return clusters


def design(
    flags: DeploymentFlags, clusters: list[ClusterHosts]
) -> tuple[Deployment, list[ClusterHosts]]:
    """The deployment without its hosts, and the clusters with their hardware."""
    if flags.plan is not None:
        return _planned(flags, flags.plan, clusters)
    model = _model_files(flags)
    catalog = Catalog.builtin().extended(flags.catalogs)
    clusters = choose_hardware(
        catalog,
        model.name,
        clusters,
        parse_per_cluster(flags.accelerators, clusters, "--accelerator"),
        parse_per_cluster(flags.gpus, clusters, "--gpus"),
    )
    link = None
    if any(cluster.kind == "prfaas" for cluster in clusters):
        if flags.gbps is None:
            raise InputError(
                "the bandwidth between the clusters is required",
                where="--gbps",
                fix="give it in 10^9 bits per second; `prfaas doctor` measures a path",
            )
        rtt_ms = DEFAULT_RTT_MS if flags.rtt_ms is None else flags.rtt_ms
        if not flags.gbps > 0 or not rtt_ms >= 0:
            raise InputError(
                "the link has no bandwidth, or a negative round trip",
                where="--gbps, --rtt-ms",
                fix="give positive numbers",
            )
        link = LinkSpeed(flags.gbps, rtt_ms)
    profiles = [
        record
        for one in clusters
        if one.kind == "pd" and one.hardware is not None
        for record in [catalog.profile(model.name, one.hardware.accelerator, one.hardware.gpus)]
        if record is not None
    ]
    catalogs = [path.resolve() for path in flags.catalogs]
    designed = design_deployment(model, catalogs, clusters, link, profiles)
    return with_policy(designed, flags.policy), clusters


def _planned(
    flags: DeploymentFlags, file: Path, clusters: list[ClusterHosts]
) -> tuple[Deployment, list[ClusterHosts]]:
    for flag, value in (
        ("--accelerator", flags.accelerators),
        ("--gpus", flags.gpus),
        ("--gbps", flags.gbps),
        ("--rtt-ms", flags.rtt_ms),
        ("--name", flags.name),
        ("--max-tokens", flags.max_tokens),
    ):
        if value not in (None, ()):
            raise InputError(
                "the plan states this", where=flag, fix=f"remove the option, or change {file}"
            )
    planned = with_absolute_paths(load_deployment(file), file.resolve().parent)
    extra = [str(path.resolve()) for path in flags.catalogs]
    planned = msgspec.structs.replace(planned, catalog=[*planned.catalog, *extra])
    if flags.model is not None and flags.engine != "emulated":
        model = _model_files(flags)
        section = msgspec.structs.replace(planned.model, config=f"{model.folder}/config.json")
        gateway = planned.gateway
        if model.folder is not None and (model.folder / "tokenizer.json").is_file():
            gateway = msgspec.structs.replace(gateway, tokenizer=str(model.folder))
        planned = msgspec.structs.replace(planned, model=section, gateway=gateway)
    designed = with_policy(extend_deployment(planned, clusters), flags.policy)
    hardware = {
        one.name: Hardware(one.accelerator, one.gpus_per_instance) for one in designed.clusters
    }
    return designed, [msgspec.structs.replace(one, hardware=hardware[one.name]) for one in clusters]


def _model_files(flags: DeploymentFlags) -> ModelFiles:
    if flags.model is None:
        raise InputError(
            "is required", where="--model", fix="give the checkpoint's folder, or --plan"
        )
    if flags.engine == "emulated":
        return ModelFiles(flags.name or flags.model, None, flags.max_tokens)
    folder = Path(flags.model).resolve()
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(
            "has no config.json",
            file=folder,
            where="--model",
            fix="give a checkpoint folder (`prfaas model make DIR` makes a small one)",
        )
    max_tokens = flags.max_tokens or _context_tokens(config)
    return ModelFiles(flags.name or folder.name, folder, max_tokens)


def _context_tokens(config: Path) -> int | None:
    """The model's context length, if its configuration states one."""
    try:
        fields = msgspec.json.decode(read_text(config), type=dict[str, Any])
    except msgspec.MsgspecError:
        raise InputError("is not valid JSON", file=config, where="--model") from None
    for key in ("max_position_embeddings", "model_max_length"):
        if isinstance(fields.get(key), int) and fields[key] > 1:
            return int(fields[key])
    return None


def model_on_hosts(flags: DeploymentFlags, designed: Deployment) -> str:
    if flags.engine == "emulated":
        return designed.model.name
    if flags.model_path is not None:
        return flags.model_path
    if designed.model.config is None:
        raise InputError(
            "the plan does not name the model's checkpoint",
            where="--model",
            fix="give the checkpoint's folder",
        )
    return str(Path(designed.model.config).parent)


def check_design(designed: Deployment) -> Problem:
    """The problem that the gateway plans. Raises InputError when it could not."""
    checked = parse_deployment(parse_toml(deployment_toml(designed), "deployment"), "deployment")
    return Study(Path("deployment"), "exact").problem(checked)
