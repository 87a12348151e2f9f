"""`prfaas render kubernetes`: Kustomize manifests of a deployment."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from prfaas.cli.deployment_options import days_option, scale_options, tenant_option
from prfaas.config import load_deployment
from prfaas.config.host import KvdSection
from prfaas.config.sizes import parse_bytes
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.kubernetes.options import (
    NetworkKind,
    RenderOptions,
    RotationStep,
    check_names,
    parse_gateway_addresses,
    parse_instances,
    parse_names,
    parse_networks,
    parse_selectors,
)
from prfaas.launch.new_deployment.answers import check_tenants
from prfaas.launch.preparation import MEMORY, LaunchOptions, prepare_launch
from prfaas.launch.services.hosts import EngineKind


@click.group()
def render() -> None:
    """Write what another system needs to run a deployment."""


@render.command()
@click.argument("file", metavar="DEPLOYMENT.toml", type=click.Path(path_type=Path))
@click.option(
    "--out",
    "folder",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the manifests. Keys, certificates and overlays that are there stay.",
)
@click.option(
    "--gateway-address",
    "addresses",
    multiple=True,
    metavar="CLUSTER=HOST:PORT",
    help="Address of a pd cluster's service gateway-members-external; for each pd cluster.",
)
@click.option(
    "--gateway-name",
    "names",
    multiple=True,
    metavar="CLUSTER=NAME",
    help="Further name by which clients reach the gateway, for its certificate; repeatable.",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "hf", "emulated"]),
    default="vllm",
    show_default=True,
    help="Engine of the pods: vLLM servers, hf (transformers), or emulated accelerators.",
)
@click.option(
    "--instances",
    multiple=True,
    metavar="CLUSTER=N",
    help="Pods of a cluster, instead of the file's number.",
)
@click.option(
    "--network",
    type=click.Choice(["pod", "host"]),
    default="pod",
    show_default=True,
    help="Addresses that pods of other clusters reach: those of pods, or those of hosts.",
)
@click.option(
    "--peer-network",
    "peers",
    multiple=True,
    metavar="CIDR",
    help="Network of the pods (or hosts) of other clusters; repeatable.  [default: everywhere]",
)
@click.option("--model-claim", metavar="NAME", help="PersistentVolumeClaim with the checkpoint.")
@click.option(
    "--model-path",
    metavar="PATH",
    help="Folder of the checkpoint in the pods.  [default: /models/ and the model's name]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help=f"Memory of each kvd.  [default: {KvdSection().memory}; emulated: {MEMORY}]",
)
@click.option("--ssd-size", metavar="SIZE", help="SSD tier of each kvd.  [default: none]")
@click.option(
    "--node-selector",
    "selectors",
    multiple=True,
    metavar="CLUSTER=LABEL=VALUE",
    help="Label of the nodes that run a cluster's pods.  [default: prfaas.io/accelerator]",
)
@click.option("--registry", default="", metavar="PREFIX", help="Registry of the images, with /.")
@tenant_option
@click.option(
    "--monitoring/--no-monitoring",
    default=True,
    show_default=True,
    help="Write ServiceMonitors and a dashboard; they need Prometheus's operator.",
)
@click.option(
    "--monitoring-namespace",
    default="monitoring",
    show_default=True,
    help="Namespace of Prometheus.",
)
@scale_options
@days_option
@click.option("--renew", is_flag=True, help="Issue all certificates again.")
@click.option(
    "--rotate-keys",
    "step",
    type=click.Choice(["add", "use", "remove"]),
    help="One of the three steps that replace the member key and the keys of operators.",
)
def kubernetes(
    file: Path,
    folder: Path,
    addresses: tuple[str, ...],
    names: tuple[str, ...],
    engine: EngineKind,
    instances: tuple[str, ...],
    network: NetworkKind,
    peers: tuple[str, ...],
    model_claim: str | None,
    model_path: str | None,
    memory: str | None,
    ssd_size: str | None,
    selectors: tuple[str, ...],
    registry: str,
    tenants: tuple[str, ...],
    monitoring: bool,
    monitoring_namespace: str,
    time_scale: float,
    byte_scale: float,
    output_scale: float,
    days: int,
    renew: bool,
    step: RotationStep | None,
) -> None:
    """Write Kustomize manifests: DIR/CLUSTER/base and DIR/CLUSTER/overlay for every cluster.

    Each cluster of the deployment is a Kubernetes cluster of its own. The first run makes a CA,
    keys and certificates in DIR; DIR/ca.key and DIR/keys stay with you. docs/kubernetes.md goes
    from nothing to a served request, and through upgrades, scaling and the rotation of keys.

    \b
      prfaas render kubernetes my.toml --out k8s --model-claim models \\
             --gateway-address pd=gateway.example.net:8080 --registry registry.example.net/
      prfaas render kubernetes configs/two_by_two.toml --out k8s --engine emulated \\
             --instances east=2 --instances west=2 --instances north=1 --instances south=1 \\
             --gateway-address east=gw.east.example:8080 \\
             --gateway-address west=gw.west.example:8080 \\
             --time-scale 0.5 --byte-scale 0.002 --output-scale 0.02
      prfaas render kubernetes ... --rotate-keys add
      kubectl apply -k k8s/east/overlay
    """
    # Imported here: `cryptography` takes longer to import than `--help` takes.
    try:
        from prfaas.launch.kubernetes.rendered_deployment import render_deployment
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        raise InputError(
            "manifests need PyYAML", fix="install it: pip install 'prfaas[kubernetes]'"
        ) from None
    stated = parse_instances(instances, load_deployment(file))
    try:
        check_names(stated)
    except InputError as error:
        raise error.in_file(file) from None
    for size, where in ((memory, "--memory"), (ssd_size, "--ssd-size")):
        if size is not None:
            parse_bytes(size, where)
    check_tenants(tenants)
    if engine != "emulated" and model_claim is None:
        raise InputError(
            "engines and gateways read the checkpoint from a volume",
            where="--model-claim",
            fix="name a PersistentVolumeClaim, or use --engine emulated",
        )
    options = RenderOptions(
        gateway_addresses=parse_gateway_addresses(addresses, stated),
        network=network,
        peer_networks=parse_networks(peers),
        certificate_names=parse_names(names, stated),
        node_selectors=parse_selectors(selectors, stated),
        monitoring=monitoring,
        monitoring_namespace=monitoring_namespace,
        tenants=tenants or ("default",),
        registry=registry,
        model_claim=model_claim,
        model_path=model_path,
        ssd_size=ssd_size,
        days=days,
    )
    with tempfile.TemporaryDirectory(prefix="prfaas-") as made:
        launch = LaunchOptions(engine, Scales(time_scale, byte_scale, output_scale))
        plan = prepare_launch(stated, file, launch, Path(made))
        render_deployment(folder, plan, options, memory, renew=renew, step=step)
    for cluster in stated.clusters:
        click.echo(f"kubectl --context {cluster.name} apply -k {folder / cluster.name / 'overlay'}")
