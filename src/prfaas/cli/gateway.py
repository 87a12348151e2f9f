"""`prfaas gateway`: one OpenAI endpoint over the clusters of a deployment."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec
import uvloop

from prfaas.cli.gateway_options import SecurityFlags, load_options
from prfaas.cli.shared_options import (
    log_format_option,
    log_level_option,
    otlp_endpoint_option,
    security_options,
    set_option,
)
from prfaas.config import Deployment, load_deployment
from prfaas.contracts.readiness import GatewayReady, readiness_line
from prfaas.errors import InputError
from prfaas.gateway.process import run_gateway
from prfaas.security.reload import defer_hangup
from prfaas.service.allocator import BODY_BYTES, limit_heap_growth
from prfaas.service.logging import LogFormat, configure_logging
from prfaas.studies.network_plans import deployment_problem
from prfaas.types import ClusterId

SWITCH_S = 0.0005
_POLICIES = ("paper", "adaptive", "local", "remote")


@click.command()
@click.argument("file", metavar="DEPLOYMENT.toml", type=click.Path(path_type=Path))
@set_option
@click.option(
    "--cluster",
    metavar="NAME",
    help="The pd cluster whose requests arrive at this gateway; needed where the file has "
    "[[gateways]].  [default: all pd clusters]",
)
@click.option("--host", help="Address to listen on, instead of the file's.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on, instead of the file's ([[gateways]] url, or gateway.port); 0 chooses "
    "a free one.",
)
@click.option(
    "--policy", type=click.Choice(_POLICIES), help="Routing policy, instead of the file's."
)
@click.option("--advise", is_flag=True, help="Show plans, but keep threshold and roles.")
@click.option("--console", is_flag=True, help="Serve the console, a page for browsers, at /.")
@click.option(
    "--operator-key-file",
    metavar="FILE",
    help="File with the key that opens the operator's paths.",
)
@security_options
@otlp_endpoint_option
@log_level_option
@log_format_option
def gateway(
    file: Path,
    assignments: tuple[str, ...],
    cluster: str | None,
    host: str | None,
    port: int | None,
    policy: str | None,
    advise: bool,
    console: bool,
    operator_key_file: str | None,
    member_key_file: str | None,
    metrics_key_file: str | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool | None,
    otlp_endpoint: str | None,
    log_level: str,
    log_format: LogFormat,
) -> None:
    """Serve /v1/completions and /v1/chat/completions; prefill where it is best, decode locally.

    Nodes are those of the file ([[clusters.nodes]]) and those whose kvd registers here
    (`prfaas kvd --gateway URL --cluster NAME`), which needs the member key. Text and chats need
    [gateway] tokenizer. Other hosts reach a gateway with API keys and TLS only (`prfaas init`
    writes such a file). SIGHUP reads keys and certificates again. All keys are in
    docs/configuration.md.

    A file may have several pd clusters. One gateway serves all of them, or with [[gateways]] each
    pd cluster has a gateway of its own, which is started with --cluster and listens on the port of
    its entry.

    With --console, a browser shows the deployment at the gateway's URL, after a login with the
    operator key (docs/console.md).

    \b
      prfaas gateway deployment.toml
      prfaas gateway regions.toml --cluster east
      curl localhost:8080/v1/completions -H 'Content-Type: application/json' \\
           -d '{"prompt": "Once upon a time", "max_tokens": 20}'
      curl localhost:8080/prfaas/v1/state
    """
    limit_heap_growth(BODY_BYTES)
    configure_logging(log_level, log_format)
    defer_hangup()
    stated = load_deployment(file, assignments)
    try:
        home = chosen_home(stated, cluster)
    except InputError as error:
        raise error.in_file(file) from None
    if port is None and home is not None:
        port = entry_port(stated, home)
    deployment = _with_flags(stated, host, port, policy, advise, console, otlp_endpoint)
    security = SecurityFlags(
        member_key_file,
        operator_key_file,
        metrics_key_file,
        tls_ca,
        tls_cert,
        tls_key,
        bool(insecure),
    )
    section = deployment.gateway
    options = load_options(file, assignments, section, security, home)
    if len(deployment.gateways) > 1 and options.backend.member_key is None and not section.insecure:
        raise InputError(
            "the gateways of [[gateways]] need a member key for each other's reports",
            file=file,
            where="gateway.member_key_file",
            fix="name a file with the key, or give --member-key-file",
        )
    problem = deployment_problem(file, deployment)
    # Threads parse and hash long prompts. The event loop releases the interpreter lock with every
    # system call; with Python's default interval it would wait 5 ms to get the lock back.
    sys.setswitchinterval(SWITCH_S)

    def announce(url: str) -> None:
        click.echo(readiness_line(GatewayReady(deployment.model.name, url)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_gateway(deployment, problem, options, announce))


def chosen_home(deployment: Deployment, name: str | None) -> ClusterId | None:
    """The pd cluster that `--cluster` names; None: the gateway serves all of them."""
    homes = [pd.name for pd in deployment.of_kind("pd")]
    if name is None:
        if deployment.gateways:
            raise InputError(
                "the file has a gateway for each pd cluster, and it is not said which this one is",
                where="--cluster",
                fix=f"give one of: {', '.join(homes)}",
            )
        return None
    if name not in homes:
        raise InputError(
            f"no pd cluster is named {name!r}",
            where="--cluster",
            fix=f"pd clusters are: {', '.join(homes)}",
        )
    if len(homes) > 1 and not deployment.gateways:
        raise InputError(
            "the gateways of several pd clusters must know one another",
            where="--cluster",
            fix="add [[gateways]] with the URL of each pd cluster's gateway, or leave --cluster "
            "out: then one gateway serves all",
        )
    return ClusterId(name)


def entry_port(deployment: Deployment, home: str) -> int | None:
    """The port of the gateway's own entry, if the file has one."""
    entry = deployment.gateway_of(home)
    return None if entry is None else entry.port


def _with_flags(
    deployment: Deployment,
    host: str | None,
    port: int | None,
    policy: str | None,
    advise: bool,
    console: bool,
    otlp_endpoint: str | None,
) -> Deployment:
    replace = msgspec.structs.replace
    section, scheduler = deployment.gateway, deployment.scheduler
    if host is not None:
        section = replace(section, host=host)
    if port is not None:
        section = replace(section, port=port)
    if advise:
        section = replace(section, advise=True)
    if console:
        section = replace(section, console=True)
    if otlp_endpoint is not None:
        section = replace(section, otlp_endpoint=otlp_endpoint)
    if policy is not None:
        scheduler = replace(scheduler, policy=policy)
    return replace(deployment, gateway=section, scheduler=scheduler)
