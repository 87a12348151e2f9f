"""`prfaas gateway`: one OpenAI endpoint over the clusters of a deployment."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec
import uvloop

from prfaas.cli.logs import log_at, log_level_option
from prfaas.config import Deployment, load_deployment
from prfaas.config.deployment import Key
from prfaas.gateway.api.api_keys import TenantKey
from prfaas.gateway.backend import BackendOptions
from prfaas.gateway.process import GatewayOptions, run_gateway
from prfaas.launch.allocator import BODY_BYTES, steady_heap
from prfaas.security.secret_file import read_secret
from prfaas.studies.problem_files import Study
from prfaas.text import load_tokenizer

_OPTIONS = GatewayOptions()  # for its defaults
SWITCH_S = 0.0005
_POLICIES = ("paper", "adaptive", "local", "remote")


@click.command()
@click.argument("file", metavar="DEPLOYMENT.toml", type=click.Path(path_type=Path))
@click.option("--host", help="Instead of the file's.")
@click.option("--port", type=click.IntRange(0, 65535), help="Likewise; 0: any free one.")
@click.option("--policy", type=click.Choice(_POLICIES), help="Likewise.")
@click.option("--advise", is_flag=True, help="Say what would be planned; do not act on it.")
@click.option("--node-key", type=click.Path(path_type=Path), help="File: the key nodes ask for.")
@click.option("--record", type=click.Path(path_type=Path), help="Write routing decisions here.")
@click.option("--drain-s", default=_OPTIONS.drain_s, show_default=True, help="After SIGTERM.")
@log_level_option
def gateway(
    file: Path,
    host: str | None,
    port: int | None,
    policy: str | None,
    advise: bool,
    node_key: Path | None,
    record: Path | None,
    drain_s: float,
    log_level: str,
) -> None:
    """Serve /v1/completions and /v1/chat/completions; prefill where it is best, decode locally.

    Nodes are those of the file ([[clusters.nodes]]) and those whose kvd registers here
    (`prfaas kvd --gateway URL --cluster NAME`). Text and chats need [gateway] tokenizer.

    \b
      prfaas gateway deployment.toml
      curl localhost:8080/v1/completions -H 'Content-Type: application/json' \\
           -d '{"prompt": "Once upon a time", "max_tokens": 20}'
      curl localhost:8080/prfaas/v1/state
    """
    log_at(log_level)
    steady_heap(BODY_BYTES)
    deployment = _with_flags(load_deployment(file), host, port, policy, advise)
    section = deployment.gateway
    options = GatewayOptions(
        tokenizer=load_tokenizer(file.parent / section.tokenizer) if section.tokenizer else None,
        keys=[_key(key, file) for key in section.keys],
        backend=BackendOptions(record=record, node_key=read_secret(node_key) if node_key else None),
        drain_s=drain_s,
    )
    problem = Study(file, "exact").problem(deployment)
    # Long prompts are parsed and hashed in threads; the event loop gives its turn away with every
    # system call, and by default would get it back after 5 ms only.
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            run_gateway(
                deployment,
                problem,
                options,
                lambda url: click.echo(f"serving {deployment.model.name} at {url}"),
            )
        )


def _with_flags(
    deployment: Deployment, host: str | None, port: int | None, policy: str | None, advise: bool
) -> Deployment:
    replace = msgspec.structs.replace
    section, scheduler = deployment.gateway, deployment.scheduler
    if host is not None:
        section = replace(section, host=host)
    if port is not None:
        section = replace(section, port=port)
    if advise:
        section = replace(section, advise=True)
    if policy is not None:
        scheduler = replace(scheduler, policy=policy)
    return replace(deployment, gateway=section, scheduler=scheduler)


def _key(key: Key, file: Path) -> TenantKey:
    secret = key.key if key.key is not None else read_secret(file.parent / (key.file or ""))
    return TenantKey(secret, key.tenant)
