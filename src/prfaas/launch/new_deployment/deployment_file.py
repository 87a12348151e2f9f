"""The deployment file of a new deployment: model, traffic, clusters, links. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from prfaas.catalog import Catalog, ProfileRecord
from prfaas.config import Deployment
from prfaas.config.deployment import (
    SLO,
    Cluster,
    Link,
    Lognormal,
    ModelSection,
    Node,
    SchedulerSection,
    Trace,
)
from prfaas.config.gateway import GatewaySection
from prfaas.errors import InputError
from prfaas.launch.new_deployment.answers import Answers, ClusterHosts, Hardware
from prfaas.launch.new_deployment.host_files import gateway_section
from prfaas.launch.services.places import MODEL_FOLDER

# The workload of the paper's section 4.1, shortened for models with a shorter context. The gateway
# plans for it until it has observed traffic.
_MEDIAN_TOKENS, _LONGEST_TOKENS, _OUTPUT_TOKENS = 19_930, 131_072, 1_024
_SIGMA, _SHORTEST_TOKENS = 1.0, 16
_TOKENS_PER_S = 40.0  # of each request, where the hardware can decode as fast
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class LinkSpeed(NamedTuple):
    gbps: float
    rtt_ms: float


class ModelFiles(NamedTuple):
    """The model of the deployment. A catalog describes a model without a `folder`."""

    name: str
    folder: Path | None  # with config.json and, for text, tokenizer.json
    max_tokens: int | None  # None: the default


def choose_hardware(
    catalog: Catalog,
    model: str,
    clusters: Sequence[ClusterHosts],
    accelerators: Mapping[str, str],
    gpus: Mapping[str, str],
) -> list[ClusterHosts]:
    """The clusters with their hardware: as given by cluster, else the only one that has a profile
    of the model and fits what is given. Raises InputError."""
    return [
        msgspec.structs.replace(
            cluster,
            hardware=_hardware(catalog.profiles_of(model), model, cluster, accelerators, gpus),
        )
        for cluster in clusters
    ]


def _hardware(
    known: Sequence[ProfileRecord],
    model: str,
    cluster: ClusterHosts,
    accelerators: Mapping[str, str],
    gpus: Mapping[str, str],
) -> Hardware:
    accelerator, count = accelerators.get(cluster.name), gpus.get(cluster.name)
    if count is not None and not (count.isascii() and count.isdigit() and 0 < int(count) < 10_000):
        raise InputError(f"{count!r} is not a number of GPUs", where="--gpus", fix="give 1 or more")
    fitting = [
        record
        for record in known
        if accelerator in (None, record.accelerator) and count in (None, str(record.gpus))
    ]
    if len(fitting) == 1:
        return Hardware(fitting[0].accelerator, fitting[0].gpus)
    if accelerator is not None and count is not None:
        return Hardware(accelerator, int(count))  # its times are estimated
    have = ", ".join(f"{record.gpus} x {record.accelerator}" for record in known)
    if not known:
        raise InputError(
            f"no catalog has a profile of {model!r}",
            where="--catalog",
            fix="measure one with `prfaas profile --out FILE`, and give its FILE; --name sets the "
            "model's name",
        )
    raise InputError(
        f"the hardware of cluster {cluster.name!r} is not clear",
        where="--accelerator, --gpus",
        fix=f"give --accelerator {cluster.name}=NAME and --gpus {cluster.name}=N; profiles of "
        f"{model}: {have}",
    )


def design_deployment(
    model: ModelFiles,
    catalogs: Sequence[Path],
    clusters: Sequence[ClusterHosts],
    link: LinkSpeed | None,
    profiles: Sequence[ProfileRecord],
) -> Deployment:
    """A deployment from answers, without nodes. Its paths are those of the given files."""
    (local,) = [cluster for cluster in clusters if cluster.kind == "pd"]
    pairs = [(one.name, local.name) for one in clusters if one.kind == "prfaas"]
    links = [] if link is None else [Link(a, b, *link) for a, b in pairs]
    links += [] if link is None else [Link(b, a, *link) for a, b in pairs]  # for prefix copies
    section = ModelSection(model.name)
    if model.folder is not None:
        section = msgspec.structs.replace(section, config=str(model.folder / "config.json"))
    if model.max_tokens is not None:
        section = msgspec.structs.replace(section, max_tokens=model.max_tokens)
    has_text = model.folder is not None and (model.folder / "tokenizer.json").is_file()
    return Deployment(
        model=section,
        workload=_workload(section.max_tokens),
        slo=SLO(output_tokens_per_s=_pace(profiles)),
        clusters=[_cluster(one, _hardware_of(one)) for one in clusters],
        links=links,
        gateway=GatewaySection(tokenizer=str(model.folder) if has_text else None),
        catalog=[str(path) for path in catalogs],
    )


def extend_deployment(planned: Deployment, clusters: Sequence[ClusterHosts]) -> Deployment:
    """A planned deployment, with as many instances as it has hosts. Raises InputError."""
    given = {cluster.name: cluster for cluster in clusters}
    for cluster in planned.clusters:
        if cluster.name not in given or given[cluster.name].kind != cluster.kind:
            raise InputError(
                f"the plan's cluster {cluster.name!r} has no hosts",
                where=f"--{cluster.kind}",
                fix=f"give --{cluster.kind} {cluster.name}=HOST,HOST",
            )
    names = [cluster.name for cluster in planned.clusters]
    for name, one in given.items():
        if name not in names:
            raise InputError(
                f"the plan has no cluster {name!r}",
                where=f"--{one.kind}",
                fix=f"clusters are: {', '.join(names)}",
            )
    changed = [
        msgspec.structs.replace(
            cluster, gpus=len(given[cluster.name].hosts) * cluster.gpus_per_instance
        )
        for cluster in planned.clusters
    ]
    return msgspec.structs.replace(planned, clusters=changed)


def with_policy(deployment: Deployment, policy: str | None) -> Deployment:
    if policy is None:
        return deployment
    rules: SchedulerSection = msgspec.structs.replace(deployment.scheduler, policy=policy)
    return msgspec.structs.replace(deployment, scheduler=rules)


def finish_deployment(designed: Deployment, answers: Answers) -> tuple[Deployment, dict[str, Path]]:
    """The deployment with its nodes and its gateway's credentials, for the gateway's folder; and
    the files to copy into that folder, by their name there."""
    copied: dict[str, Path] = {}
    section = designed.model
    if section.config is not None:
        copied[f"{MODEL_FOLDER}/config.json"] = Path(section.config)
        section = msgspec.structs.replace(section, config=f"{MODEL_FOLDER}/config.json")
    gateway = designed.gateway
    if gateway.tokenizer is not None:
        for name in _TOKENIZER_FILES:
            if (Path(gateway.tokenizer) / name).is_file():
                copied[f"{MODEL_FOLDER}/{name}"] = Path(gateway.tokenizer) / name
        for path in sorted(Path(gateway.tokenizer).glob("additional_chat_templates/*.jinja")):
            copied[f"{MODEL_FOLDER}/additional_chat_templates/{path.name}"] = path
        gateway = msgspec.structs.replace(gateway, tokenizer=MODEL_FOLDER)
    workload = designed.workload
    if isinstance(workload, Trace):
        name = "trace" + "".join(Path(workload.path).suffixes[-2:])
        copied[name] = Path(workload.path)
        workload = msgspec.structs.replace(workload, path=name)
    catalogs = catalog_files(designed)
    copied |= catalogs
    nodes = {
        cluster.name: [
            Node(
                f"https://{answers.node_address(one)}",
                f"https://{answers.kvd_address(one)}",
            )
            for one in answers.instances
            if one.cluster == cluster.name
        ]
        for cluster in designed.clusters
    }
    finished = msgspec.structs.replace(
        designed,
        model=section,
        workload=workload,
        clusters=[
            msgspec.structs.replace(cluster, nodes=nodes[cluster.name])
            for cluster in designed.clusters
        ],
        gateway=gateway_section(answers, gateway),
        catalog=list(catalogs),
    )
    return finished, copied


def catalog_files(deployment: Deployment) -> dict[str, Path]:
    """The catalog files by their name in a host's folder."""
    return {
        f"catalog{'' if n == 0 else f'-{n + 1}'}.toml": Path(path)
        for n, path in enumerate(deployment.catalog)
    }


def _workload(max_tokens: int) -> Lognormal:
    longest = max(1, min(_LONGEST_TOKENS, max_tokens * 7 // 8))  # a response must fit after it
    median = max(1, min(_MEDIAN_TOKENS, longest // 16))
    output = max(1, min(_OUTPUT_TOKENS, max_tokens - longest))
    return Lognormal(
        round(math.log(median), 2),
        _SIGMA,
        min_tokens=min(_SHORTEST_TOKENS, longest),
        max_tokens=longest,
        output_tokens=output,
    )


def _pace(profiles: Sequence[ProfileRecord]) -> float:
    """Tokens per second of each request: half of what an otherwise idle instance decodes."""
    steps = [point.step_s for record in profiles for point in record.decode]
    if not steps:
        return _TOKENS_PER_S  # the problem is reported when the deployment is checked
    return float(f"{min(_TOKENS_PER_S, 0.5 / min(steps)):.2g}")


def _hardware_of(cluster: ClusterHosts) -> Hardware:
    assert cluster.hardware is not None, "chosen before"
    return cluster.hardware


def _cluster(cluster: ClusterHosts, hardware: Hardware) -> Cluster:
    return Cluster(
        cluster.name,
        cluster.kind,
        hardware.accelerator,
        gpus=hardware.gpus * len(cluster.hosts),
        gpus_per_instance=hardware.gpus,
    )
