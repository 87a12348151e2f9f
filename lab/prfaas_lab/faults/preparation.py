"""The deployment for fault injection: one PrfaaS node, one local prefill node, two decode nodes.

Two decode nodes, so that one of them may die. A file with several PD clusters gives as many small
clusters as it has (`clusters/sizes.py`). Everything is small enough for two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from prfaas.config import Deployment, load_deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.preparation import (
    TINY_DEVICE,
    LaunchOptions,
    LaunchPlan,
    prepare_launch,
    tiny_deployment,
)
from prfaas_lab.faults.clusters.sizes import small_clusters, tiny_clusters
from prfaas_lab.faults.episode import Lengths

FaultEngine: TypeAlias = Literal["hf", "emulated"]
EMULATED_FILE = Path("configs/case_study.toml")  # whose clusters are emulated if none is named
# A prompt of 100,000 tokens takes an emulated node about a second and has 3 MB of KV.
SCALES = Scales(time=0.1, bytes=0.002, output=0.02)
EMULATED = Lengths(short=1_000, long=100_000)
HF = Lengths(short=100, long=2_500)
MAX_TOKENS = 131_072  # context length: a hostile tenant sends prompts of this length
MEMORY = "64MiB"  # of each kvd: small enough to fill, larger than the transfers in flight
# Small enough to fill within minutes, too. Every unit on it costs a kvd and each gateway a kilobyte
# of memory, so that a larger one is still filling when a soak begins to judge growth.
SSD_SIZE = "16MiB"
WORKERS = 1  # of each kvd: faults strike workers, too, and there are few cores


async def prepare_fault_deployment(
    engine: FaultEngine, file: Path | None, folder: Path, cache: Path, say: Callable[[str], None]
) -> tuple[LaunchPlan, Lengths]:
    """`file`: deployment whose clusters are made small; None: `EMULATED_FILE`, which only emulated
    engines need. Real engines have the tiny model that the folder `cache` keeps, and of the file
    only the names of several clusters and their links."""
    options = LaunchOptions(
        engine, SCALES if engine == "emulated" else Scales(), device=TINY_DEVICE
    )
    if engine == "emulated":
        file = file or EMULATED_FILE
        given = load_deployment(file)
        deployment = small_clusters(given) if _has_several(given) else _one_and_three(given)
        lengths = EMULATED
    else:
        names = None if file is None else load_deployment(file)
        tiny, file = await tiny_deployment(cache, options, say)
        if names is not None and _has_several(names):
            deployment = tiny_clusters(names, tiny)
        else:
            deployment = _one_and_three(tiny)
        lengths = HF
    ready = prepare_launch(_with_threshold(deployment, lengths), file, options, folder)
    engines = replace(
        ready.engines,
        memory=MEMORY,
        ssd_size=SSD_SIZE,
        options=[*ready.engines.options, "--set", f"kvd.workers={WORKERS}"],
    )
    return LaunchPlan(ready.deployment, engines), lengths


def _has_several(deployment: Deployment) -> bool:
    return len(deployment.of_kind("pd")) > 1


def _one_and_three(deployment: Deployment) -> Deployment:
    far, near = deployment.clusters
    return msgspec.structs.replace(
        deployment,
        clusters=[
            msgspec.structs.replace(far, gpus=far.gpus_per_instance),
            msgspec.structs.replace(near, gpus=3 * near.gpus_per_instance, prefill=1, decode=2),
        ],
    )


def _with_threshold(deployment: Deployment, lengths: Lengths) -> Deployment:
    rules = msgspec.structs.replace(
        deployment.scheduler,
        policy="paper",  # only the length of a prompt decides where it is prefilled
        threshold_tokens=round((lengths.short * lengths.long) ** 0.5),
    )
    model = deployment.model
    return msgspec.structs.replace(
        deployment,
        model=msgspec.structs.replace(model, max_tokens=min(model.max_tokens, MAX_TOKENS)),
        scheduler=rules,
    )
