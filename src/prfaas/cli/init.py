"""`prfaas init`: the files of a new deployment, and the command lines of its hosts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from prfaas.cli.deployment_options import days_option, tenant_option
from prfaas.cli.init_answers import (
    DEFAULT_RTT_MS,
    DeploymentFlags,
    ask,
    check_design,
    design,
    model_on_hosts,
    read_clusters,
)
from prfaas.config.host import KvdSection
from prfaas.config.sizes import parse_bytes
from prfaas.display.console import print_json
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.new_deployment.answers import (
    Answers,
    EngineName,
    Instance,
    Ports,
    check_tenants,
    folder_name,
    parse_host,
    place_instances,
)
from prfaas.launch.new_deployment.deployment_file import catalog_files
from prfaas.launch.new_deployment.host_files import (
    HostSummary,
    copy_certificate_command,
    request_command,
    state_command,
    summarise_host,
)
from prfaas.launch.preparation import EMULATED_BLOCK_TOKENS, emulated_deployment
from prfaas.launch.services.places import MODEL_FOLDER
from prfaas.planner.lost_sites import served
from prfaas.scheduler.plan import hardware_for
from prfaas.studies.network_plans import NetworkStudy

_PORTS = Ports()
_FILE = click.Path(path_type=Path)
_PORT = click.IntRange(1, 65535)


class Summary(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    folder: str
    gateway: str
    model: str  # the checkpoint's folder on every host; empty with emulated engines
    hosts: list[HostSummary]
    request: str  # a command line that sends a request
    state: str  # a command line that shows the state of the deployment
    # Of a new deployment: what it serves, and what is left without each PrfaaS cluster.
    capacity_rps: float | None = None
    lost_sites: list[dict[str, Any]] = []


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--pd",
    "local",
    multiple=True,
    metavar="[NAME=]HOST,HOST",
    help="Hosts of the PD cluster. A host that is named twice runs two instances.",
)
@click.option(
    "--prfaas",
    "remote",
    multiple=True,
    metavar="[NAME=]HOST,HOST",
    help="Hosts of a PrfaaS cluster; repeatable.",
)
@click.option(
    "--gateway", metavar="HOST", help="Host of the gateway.  [default: the first PD host]"
)
@click.option(
    "--plan",
    type=_FILE,
    help="Deployment file (see `prfaas plan`) with model, traffic, hardware and links.",
)
@click.option(
    "--engine",
    type=click.Choice(["hf", "emulated", "vllm"]),
    default="hf",
    show_default=True,
    help="Engine of the hosts: hf (transformers), emulated accelerators, or vLLM servers.",
)
@click.option(
    "--model",
    help="Checkpoint folder with config.json and tokenizer.json; emulated: a model of the catalog.",
)
@click.option(
    "--model-path",
    metavar="PATH",
    help="Checkpoint folder on the hosts.  [default: the absolute path of --model]",
)
@click.option("--name", help="Model name in catalog and API.  [default: the folder's name]")
@click.option(
    "--catalog",
    "catalogs",
    multiple=True,
    type=_FILE,
    help="Catalog file with a profile of the model (`prfaas profile --out FILE`); repeatable.",
)
@click.option(
    "--accelerator",
    "accelerators",
    multiple=True,
    metavar="[CLUSTER=]NAME",
    help="Accelerator of a cluster or of all.  [default: the only one with a profile]",
)
@click.option(
    "--gpus",
    multiple=True,
    metavar="[CLUSTER=]N",
    help="GPUs of each host's instance.  [default: the only number with a profile]",
)
@click.option("--gbps", type=float, help="Bandwidth between the clusters in 10^9 bits/s.")
@click.option(
    "--rtt-ms",
    type=float,
    help=f"Round-trip time between the clusters in milliseconds.  [default: {DEFAULT_RTT_MS:g}]",
)
@click.option(
    "--policy",
    type=click.Choice(["paper", "adaptive", "local", "remote"]),
    help="Routing policy of the gateway.  [default: adaptive]",
)
@click.option("--max-tokens", type=click.IntRange(min=2), help="Longest prompt and response.")
@click.option(
    "--memory",
    metavar="SIZE",
    default=KvdSection().memory,
    show_default=True,
    help="Memory of each kvd for KV.",
)
@tenant_option
@days_option
@click.option(
    "--gateway-port",
    type=_PORT,
    default=_PORTS.gateway,
    show_default=True,
    help="Port of the gateway.",
)
@click.option(
    "--node-port", type=_PORT, default=_PORTS.node, show_default=True, help="Port of a node."
)
@click.option(
    "--kvd-http-port",
    type=_PORT,
    default=_PORTS.kvd_http,
    show_default=True,
    help="Port of a kvd's HTTP API.",
)
@click.option(
    "--kvd-port",
    type=_PORT,
    default=_PORTS.kvd_data,
    show_default=True,
    help="Port for KV between hosts. Further instances of a host use the ports after these.",
)
@click.option(
    "--all-addresses",
    is_flag=True,
    help="Listen on all addresses of each host, as behind address translation.",
)
@click.option(
    "--add-host",
    metavar="CLUSTER=HOST",
    help="Add a host to the deployment in DIR; it registers at the gateway.",
)
@click.option(
    "--renew", is_flag=True, help="Issue new certificates for the hosts of the deployment in DIR."
)
@click.option("--force", is_flag=True, help="Replace the deployment in DIR, its keys and its CA.")
@click.option("--json", "as_json", is_flag=True, help="Print the hosts and commands as JSON.")
@click.pass_context
def init(
    ctx: click.Context,
    folder: Path,
    plan: Path | None,
    engine: EngineName,
    model: str | None,
    model_path: str | None,
    name: str | None,
    catalogs: tuple[Path, ...],
    local: tuple[str, ...],
    remote: tuple[str, ...],
    gateway: str | None,
    accelerators: tuple[str, ...],
    gpus: tuple[str, ...],
    gbps: float | None,
    rtt_ms: float | None,
    policy: str | None,
    max_tokens: int | None,
    memory: str,
    tenants: tuple[str, ...],
    days: int,
    gateway_port: int,
    node_port: int,
    kvd_http_port: int,
    kvd_port: int,
    all_addresses: bool,
    add_host: str | None,
    renew: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the files of a new deployment into DIR: a CA, a certificate for each host, keys, host
    files and the deployment file; then print the commands of every host.

    Copy each folder of DIR/hosts to its host and run the printed commands there. The hosts then
    serve requests over mutual TLS; nothing else needs to be configured. DIR/ca.key stays with you:
    with it, hosts can be added. DIR/client is for tenants: the CA and API keys for /v1/*.
    DIR/operator is for you and Prometheus: a certificate, and the key for state and metrics.
    docs/security.md explains the credentials.

    On a terminal the command asks for the answers that are missing.

    \b
      prfaas init deploy --model ./tiny-kimi --catalog profile.toml \\
             --pd pd=10.0.0.1,10.0.0.2 --prfaas far=10.1.0.1 --gbps 100 --rtt-ms 20
      prfaas init deploy --plan my.toml --engine vllm --pd pd=d1,d2 --prfaas prfaas=p1 --gateway gw
      prfaas init deploy --add-host pd=10.0.0.3
      prfaas init deploy --renew
    """
    if add_host is not None or renew:
        _refuse_other_options(ctx)
        _change(folder, add_host, as_json=as_json)
        return
    flags = DeploymentFlags(
        plan=plan,
        model=model,
        name=name,
        model_path=model_path,
        catalogs=catalogs,
        engine=engine,
        local=local,
        remote=remote,
        gateway=gateway,
        accelerators=accelerators,
        gpus=gpus,
        gbps=gbps,
        rtt_ms=rtt_ms,
        policy=policy,
        max_tokens=max_tokens,
    )
    # Imported here: `cryptography` takes longer to import than `--help` takes.
    from prfaas.launch.new_deployment.folder import check_replaceable, write_deployment

    check_replaceable(folder, force=force)
    if sys.stdin.isatty():
        flags = ask(flags)
    parse_bytes(memory, "--memory")
    check_tenants(tenants)
    clusters = read_clusters(flags)
    designed, clusters = design(flags, clusters)
    capacity = served(hardware_for(designed.scheduler.policy, check_design(designed)))
    first = next(one.hosts[0] for one in clusters if one.kind == "pd")
    answers = Answers(
        clusters=clusters,
        instances=place_instances(clusters),
        gateway=parse_host(flags.gateway or first, "--gateway"),
        engine=engine,
        model=model_on_hosts(flags, designed),
        name=designed.model.name,
        tenants=list(tenants) or ["default"],
        memory=memory,
        ports=Ports(kvd_port, kvd_http_port, node_port, gateway_port),
        all_addresses=all_addresses,
        days=days,
    )
    with tempfile.TemporaryDirectory(prefix="prfaas-") as made:
        if engine == "emulated":
            study = NetworkStudy(Path("deployment"), "exact")
            designed = emulated_deployment(designed, study, Path(made), Scales())
            answers = msgspec.structs.replace(
                answers,
                block_tokens=EMULATED_BLOCK_TOKENS,
                catalogs=list(catalog_files(designed)),
            )
        answers.check()
        write_deployment(folder, answers, designed, force=force)
    summary = _summary(folder, answers, answers.instances)
    summary = msgspec.structs.replace(
        summary,
        capacity_rps=capacity.rps,
        lost_sites=[lost.as_dict() for lost in capacity.lost_sites],
    )
    _show(summary, as_json=as_json, is_new=True, capacity=capacity.in_words)


def _change(folder: Path, added_host: str | None, *, as_json: bool) -> None:
    """Adds a host to a deployment, or renews the certificates of all hosts."""
    from prfaas.launch.new_deployment.folder import add_host, renew_certificates

    if added_host is None:
        answers = renew_certificates(folder)
        _show_renewed(folder, answers, as_json=as_json)
        return
    cluster, equals, host = added_host.partition("=")
    if not equals:
        raise InputError(
            f"{added_host!r} does not name a cluster", where="--add-host", fix="write CLUSTER=HOST"
        )
    answers, added = add_host(folder, cluster.strip(), parse_host(host, "--add-host"))
    _show(_summary(folder, answers, [added]), as_json=as_json, is_new=False)


def _refuse_other_options(ctx: click.Context) -> None:
    """`--add-host` and `--renew` change a deployment whose answers are known."""
    allowed = {"folder", "as_json"}
    alone = "--renew" if ctx.params["renew"] else "--add-host"
    for parameter in ctx.command.params:
        name = parameter.name or ""
        given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name not in allowed and parameter.opts[0] != alone:
            raise InputError(
                f"does not go with {alone}: the settings are those of the deployment in DIR",
                where=parameter.opts[0],
                fix="remove the option",
            )


def _summary(folder: Path, answers: Answers, instances: Sequence[Instance]) -> Summary:
    at = str(folder)
    hosts = list(dict.fromkeys(one.host for one in instances))
    if list(instances) == answers.instances:
        hosts = answers.hosts
    tokenizer = folder / "hosts" / folder_name(answers.gateway) / MODEL_FOLDER / "tokenizer.json"
    return Summary(
        folder=at,
        gateway=answers.gateway_url,
        model="" if answers.engine == "emulated" else answers.model,
        hosts=[summarise_host(answers, host, at, instances) for host in hosts],
        request=request_command(answers, at, text=tokenizer.is_file()),
        state=state_command(answers, at),
    )


def _show(summary: Summary, *, as_json: bool, is_new: bool, capacity: str = "") -> None:
    if as_json:
        print_json(msgspec.to_builtins(summary))
        return
    if is_new:
        click.echo(
            f"{summary.folder} has the files of {len(summary.hosts)} hosts, a CA and keys. Keep "
            f"{summary.folder}/ca.key secret:\nwith it, a host can join the deployment."
        )
    click.echo(
        "\nCopy each host's folder; then run its commands in the copied folder, each as a process "
        "of its own,\na kvd before its node."
    )
    if summary.model:
        click.echo(f"The model's checkpoint is expected at {summary.model} on every host.")
    for host in summary.hosts:
        names = dict.fromkeys(one.name or one.service for one in host.commands)
        click.echo(f"\n{host.host}  ({', '.join(names)})")
        click.echo(f"  {host.copy}")
        for one in host.commands:
            click.echo(f"    {one.command}")
    if capacity:
        click.echo(f"\n{capacity}")
    if is_new:
        click.echo(f"\nSend a request:\n  {summary.request}")
        click.echo(f"\nShow the state of the deployment:\n  {summary.state}")
    else:
        click.echo(f"\nThe host registers at {summary.gateway}; show it:\n  {summary.state}")


def _show_renewed(folder: Path, answers: Answers, *, as_json: bool) -> None:
    copies = [copy_certificate_command(host, str(folder)) for host in answers.hosts]
    if as_json:
        print_json({"folder": str(folder), "copy": copies})
        return
    click.echo("Copy the new certificates, then send SIGHUP to every kvd, node and gateway:\n")
    for line in copies:
        click.echo(f"  {line}")
