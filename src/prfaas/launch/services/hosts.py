"""The hosts of a deployment, and the engine that each of them runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from prfaas.config import Deployment
from prfaas.config.host import NodeSection

EngineKind: TypeAlias = Literal["hf", "emulated", "vllm"]


@dataclass(frozen=True, slots=True)
class Host:
    """One instance of a cluster: an engine and its kvd."""

    name: str
    cluster: str
    accelerator: str
    gpus: int
    number: int = 0  # among all hosts


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine and the kvd of every host."""

    kind: EngineKind
    model: str  # a checkpoint's folder; emulated: a name of the catalog
    name: str  # as clients request it
    memory: str  # of each kvd, as `prfaas kvd --memory` takes it
    block_tokens: int = NodeSection().block_tokens
    catalog: Sequence[Path] = ()  # emulated: files with its profile
    tokenizer: Path | None = None
    python: Path | None = None  # vllm: the interpreter that has it
    cores: Sequence[int] = (0,)  # vllm: of this machine; each engine has one of them
    device: str | None = None  # hf: None: the best that is present
    ssd_size: str | None = None  # of each kvd's SSD tier; None: there is none
    options: Sequence[str] = ()  # of every kvd and `prfaas node`, such as --member-key-file FILE


def list_hosts(deployment: Deployment) -> list[Host]:
    instances = [(cluster, n) for cluster in deployment.clusters for n in range(cluster.instances)]
    return [
        Host(f"{c.name}-{n}", c.name, c.accelerator, c.gpus_per_instance, number)
        for number, (c, n) in enumerate(instances)
    ]
