"""Deployments that are rendered for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prfaas.config import Deployment, load_deployment
from prfaas.config.address import Address
from prfaas.launch.kubernetes.options import RenderOptions, parse_instances
from prfaas.launch.kubernetes.rendered_deployment import render_deployment
from prfaas.launch.preparation import LaunchOptions, LaunchPlan, prepare_launch
from prfaas.launch.services.hosts import EngineKind, EngineSpec
from tests.launch.kubernetes.pod_processes import read_manifests, read_yaml

CONFIGS = Path(__file__).parents[3] / "configs"
TWO_BY_TWO = CONFIGS / "two_by_two.toml"
CLUSTERS = ("east", "west", "north", "south")
SMALL = ("east=2", "west=2", "north=1", "south=1")
OPTIONS = RenderOptions(
    gateway_addresses={
        "east": Address("10.9.0.1", 8080),
        "west": Address("gw.west.example", 8443),
    },
    peer_networks=("10.1.0.0/16",),
    tenants=("acme", "test"),
)


def plan(folder: Path, engine: EngineKind) -> LaunchPlan:
    """Two PD clusters and two PrfaaS clusters, with few instances."""
    deployment = parse_instances(SMALL, load_deployment(TWO_BY_TWO))
    if engine == "emulated":
        return prepare_launch(deployment, TWO_BY_TWO, LaunchOptions(engine), folder)
    model = msgspec.structs.replace(deployment.model, config="/here/config.json")
    gateway = msgspec.structs.replace(deployment.gateway, tokenizer="/here")
    deployment = msgspec.structs.replace(deployment, model=model, gateway=gateway)
    return LaunchPlan(deployment, EngineSpec(engine, "/here", model.name, "64GiB"))


def options_for(engine: EngineKind, **changes: Any) -> RenderOptions:
    claim = None if engine == "emulated" else "models"
    return msgspec.structs.replace(OPTIONS, model_claim=claim, **changes)


def render(folder: Path, engine: EngineKind, **changes: Any) -> Path:
    """The folder of the manifests."""
    made = folder / "made"
    made.mkdir(exist_ok=True)
    render_deployment(folder / "k8s", plan(made, engine), options_for(engine, **changes), None)
    return folder / "k8s"


def objects(folder: Path, cluster: str, kind: str) -> dict[str, dict[str, Any]]:
    """Objects of the base and the overlay, by name."""
    found = [
        one
        for part in ("base", "overlay")
        for one in read_manifests(folder / cluster / part)
        if one["kind"] == kind
    ]
    return {one["metadata"]["name"]: one for one in found}


def pod_specs(folder: Path, cluster: str) -> dict[str, dict[str, Any]]:
    """Specifications of pods by the name of what makes them."""
    made = objects(folder, cluster, "StatefulSet") | objects(folder, cluster, "Deployment")
    return {name: one["spec"]["template"]["spec"] for name, one in made.items()}


def container(folder: Path, cluster: str, owner: str, name: str) -> dict[str, Any]:
    (found,) = [
        one for one in pod_specs(folder, cluster)[owner]["containers"] if one["name"] == name
    ]
    return found


def served_deployment(folder: Path, cluster: str) -> Deployment:
    return load_deployment(folder / cluster / "base" / "deployment.toml")


def kustomization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(folder / "kustomization.yaml")
    return found
