"""Writes an option of `prfaas advise` as a deployment file that `plan` and `simulate` read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from prfaas.advisor.option import Group, Option
from prfaas.config import Deployment
from prfaas.config.advice import AdviceQuestion
from prfaas.config.deployment import Cluster, Link, Trace
from prfaas.config.write import deployment_toml


def option_toml(option: Option, question: AdviceQuestion, beside: Path, out: Path) -> str:
    """The text of the deployment file `out`. Paths of the question are relative to the folder
    `beside`, and paths of the deployment are relative to its own."""

    def moved(path: str) -> str:
        return os.path.relpath(beside / path, out.absolute().parent)

    model, workload = question.model, question.workload
    if model.config is not None:
        model = msgspec.structs.replace(model, config=moved(model.config))
    if isinstance(workload, Trace):
        workload = msgspec.structs.replace(workload, path=moved(workload.path))
    clusters = [_cluster("pd", option.local)]
    links = []
    if option.remote is not None and option.link is not None:
        clusters.insert(0, _cluster("prfaas", option.remote))
        links = [Link("prfaas", "pd", option.link.gbps, option.link.rtt_s * 1e3)]
    deployment = Deployment(
        model=model,
        workload=workload,
        slo=question.slo,
        clusters=clusters,
        links=links,
        catalog=[moved(path) for path in question.catalog],
    )
    head = (
        "# Written by `prfaas advise`. Times that are not in the catalog are estimated.\n"
        f"#   prfaas plan {out.name} --reading exact\n"
        f"#   prfaas simulate {out.name}\n\n"
    )
    return head + deployment_toml(deployment)


def _cluster(kind: str, group: Group) -> Cluster:
    assert kind in ("pd", "prfaas")
    return Cluster(
        name=kind,
        kind="pd" if kind == "pd" else "prfaas",
        accelerator=group.accelerator,
        gpus=group.gpus,
        gpus_per_instance=group.place.build.gpus,
        # An owned GPU has no price to buy; the catalog's is then used for baselines.
        usd_per_gpu_hour=group.supply.buy_usd,
    )
