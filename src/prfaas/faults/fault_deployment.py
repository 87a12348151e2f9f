"""The deployment that faults happen to: one PrfaaS node, at home one prefill node and two that
decode, so that one of each kind may die; everything small, so that two cores carry it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from prfaas.config import Deployment, load_deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.faults.episode import Lengths
from prfaas.launch.preparation import (
    TINY_DEVICE,
    LaunchOptions,
    LaunchPlan,
    prepare_launch,
    tiny_deployment,
)

FireEngine: TypeAlias = Literal["hf", "emulated"]
# Prompts of 100,000 tokens take an emulated node about a second, and are 3 MB.
SCALES = Scales(time=0.1, bytes=0.002, output=0.02)
EMULATED = Lengths(short=1_000, long=100_000)
HF = Lengths(short=100, long=2_500)
MEMORY = "64MiB"  # of each kvd: little enough to fill, more than what is under way
SSD_SIZE = "64MiB"


def fire(
    engine: FireEngine, file: Path, folder: Path, cache: Path, say: Callable[[str], None]
) -> tuple[LaunchPlan, Lengths]:
    """`file`: the case study's deployment, for emulated engines. `cache`: where a tiny model is
    kept, for real ones."""
    options = LaunchOptions(
        engine, SCALES if engine == "emulated" else Scales(), device=TINY_DEVICE
    )
    if engine == "emulated":
        deployment, lengths = load_deployment(file), EMULATED
    else:
        deployment, file = tiny_deployment(cache, options, say)
        lengths = HF
    ready = prepare_launch(_one_and_three(deployment, lengths), file, options, folder)
    return LaunchPlan(
        ready.deployment, replace(ready.engines, memory=MEMORY, ssd_size=SSD_SIZE)
    ), lengths


def _one_and_three(deployment: Deployment, lengths: Lengths) -> Deployment:
    far, near = deployment.clusters
    rules = msgspec.structs.replace(
        deployment.scheduler,
        policy="paper",  # the length of a prompt alone decides where it is prefilled
        threshold_tokens=round((lengths.short * lengths.long) ** 0.5),
    )
    return msgspec.structs.replace(
        deployment,
        clusters=[
            msgspec.structs.replace(far, gpus=far.gpus_per_instance),
            msgspec.structs.replace(near, gpus=3 * near.gpus_per_instance, prefill=1, decode=2),
        ],
        scheduler=rules,
    )
