"""`prfaas kvd`: the KV store of one host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import uvloop

from prfaas.cli.shared_options import (
    log_format_option,
    log_level_option,
    otlp_endpoint_option,
    read_key,
    security_options,
    set_option,
)
from prfaas.config.address import parse_address
from prfaas.config.host import KvdSection, load_host_config
from prfaas.config.sizes import parse_bytes
from prfaas.contracts.readiness import KvdReady, readiness_line
from prfaas.errors import InputError
from prfaas.kvd.process import KvdOptions, RunningKvd, serve_kvd
from prfaas.kvd.store import StoreOptions
from prfaas.security.tls import load_identity
from prfaas.service.allocator import limit_heap_growth
from prfaas.service.logging import LogFormat, configure_logging

_DEFAULTS = KvdSection()
_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--config", type=_FILE, help="Host file; this command reads its [kvd] section.")
@set_option
@click.option("--socket", help="Unix socket for the engines of this host.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=f"Address for KV from other hosts.  [default: {_DEFAULTS.listen}]",
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    help=f"Address of the HTTP API for gateways.  [default: {_DEFAULTS.http}]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help=f"Size of the arena in shared memory.  [default: {_DEFAULTS.memory}]",
)
@click.option("--ssd", metavar="DIR", help="Folder for prefixes that memory cannot hold.")
@click.option("--node", metavar="NAME", help="Name of this kvd in cache events and at gateways.")
@click.option(
    "--cluster",
    metavar="NAME",
    help="Cluster of this host in the deployment file; --gateway needs it.",
)
@click.option(
    "--gateway",
    "gateways",
    multiple=True,
    metavar="URL",
    help="Gateway to register with; repeatable.",
)
@security_options
@otlp_endpoint_option
@log_level_option
@log_format_option
def kvd(
    config: Path | None,
    assignments: tuple[str, ...],
    socket: str | None,
    listen: str | None,
    http: str | None,
    memory: str | None,
    ssd: str | None,
    node: str | None,
    cluster: str | None,
    gateways: tuple[str, ...],
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
    """Keep the KV of this host's engines: a prefix pool in shared memory (and on SSD), transfers to
    and from other hosts, an HTTP API for gateways.

    \b
      prfaas kvd --socket /run/prfaas/kvd.sock --listen 127.0.0.1:7400 --http 127.0.0.1:7401 \\
                 --memory 64GiB
      prfaas kvd --config host.toml

    Other hosts reach a kvd with a member key and TLS only (`prfaas init` writes such host files,
    docs/security.md explains them). SIGTERM lets transfers finish, SIGHUP reads keys and
    certificates again. With port 0 the system chooses a free port. The first line on standard
    output is JSON and announces the addresses. All keys are in docs/configuration.md.
    """
    flags = {
        "kvd.socket": socket,
        "kvd.listen": listen,
        "kvd.http": http,
        "kvd.memory": memory,
        "kvd.ssd": ssd,
        "kvd.node": node,
        "kvd.cluster": cluster,
        "kvd.gateways": gateways,
        "kvd.member_key_file": member_key_file,
        "kvd.metrics_key_file": metrics_key_file,
        "kvd.insecure": insecure,
        "kvd.tls.ca": tls_ca,
        "kvd.tls.cert": tls_cert,
        "kvd.tls.key": tls_key,
        "kvd.otlp_endpoint": otlp_endpoint,
    }
    options = _options(load_host_config(config, assignments, flags).kvd)
    limit_heap_growth()
    configure_logging(log_level, log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_kvd(options, _announce))


def _options(section: KvdSection) -> KvdOptions:
    if section.socket is None:
        raise InputError("is required", where="--socket", fix="give it, or kvd.socket in the file")
    if section.via is not None:
        parse_address(section.via, "kvd.via")
    if section.gateways and section.cluster is None:
        raise InputError(
            "a cluster is required to register at a gateway",
            where="--gateway",
            fix="give --cluster with a name from the deployment file",
        )
    return KvdOptions(
        socket=Path(section.socket),
        listen=parse_address(section.listen, "--listen", any_port=True),
        http=parse_address(section.http, "--http", any_port=True),
        node=section.node,
        advertise=section.advertise,
        via=section.via,
        cluster=section.cluster or "",
        gateways=section.gateways,
        tls=load_identity(section.tls, "kvd.tls"),
        member_key=read_key(section.member_key_file),
        metrics_key=read_key(section.metrics_key_file),
        peers=section.peers,
        insecure=section.insecure,
        store=StoreOptions(
            memory_bytes=parse_bytes(section.memory, "--memory"),
            ssd=Path(section.ssd) if section.ssd is not None else None,
            ssd_bytes=parse_bytes(section.ssd_size, "kvd.ssd_size"),
            checkpoints=section.checkpoints,
        ),
        timeouts=section.timeouts,
        connections=section.connections,
        workers=section.workers,
        otlp_endpoint=section.otlp_endpoint,
        credentials_poll_s=section.credentials_poll_s,
    )


def _announce(kvd: RunningKvd) -> None:
    ready = KvdReady(str(kvd.store.node), str(kvd.socket), str(kvd.data), kvd.http_url)
    click.echo(readiness_line(ready))
