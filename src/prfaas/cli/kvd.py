"""`prfaas kvd`: the KV store of one host."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click
import uvloop

from prfaas.cli.shared_options import configure_logging, log_level_option, set_option
from prfaas.config.address import parse_address
from prfaas.config.host import KvdSection, TlsSection, load_host_config
from prfaas.config.sizes import parse_bytes
from prfaas.contracts.readiness import KvdReady, readiness_line
from prfaas.errors import InputError
from prfaas.kvd.process import KvdOptions, TlsFiles, run_kvd
from prfaas.kvd.store import StoreOptions
from prfaas.launch.allocator import limit_heap_growth
from prfaas.security.deployment_key import read_deployment_key
from prfaas.security.secret_file import read_secret

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
@click.option(
    "--kvd-key-file", metavar="FILE", help="File with the key that kvds of the deployment share."
)
@click.option("--tls-ca", metavar="FILE", help="CA certificate for mutual TLS between kvds.")
@click.option("--tls-cert", metavar="FILE", help="This host's certificate.")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate.")
@log_level_option
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
    kvd_key_file: str | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    log_level: str,
) -> None:
    """Keep the KV of this host's engines: a prefix pool in shared memory (and on SSD), transfers to
    and from other hosts, an HTTP API for gateways.

    \b
      prfaas kvd --socket /run/prfaas/kvd.sock --listen 0.0.0.0:7400 --http 0.0.0.0:7401 \\
                 --memory 64GiB --cluster pd --gateway http://gw:8080
      prfaas kvd --config host.toml

    With port 0 the system chooses a free port. The first line on standard output is JSON and
    announces the addresses. All keys are in docs/configuration.md.
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
        "kvd.kvd_key_file": kvd_key_file,
        "kvd.tls.ca": tls_ca,
        "kvd.tls.cert": tls_cert,
        "kvd.tls.key": tls_key,
    }
    options = _options(load_host_config(config, assignments, flags).kvd)
    configure_logging(log_level)
    limit_heap_growth()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options))


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
    api_key, kvd_key = section.gateway_api_key_file, section.kvd_key_file
    return KvdOptions(
        socket=Path(section.socket),
        listen=parse_address(section.listen, "--listen", any_port=True),
        http=parse_address(section.http, "--http", any_port=True),
        node=section.node,
        advertise=section.advertise,
        via=section.via,
        cluster=section.cluster or "",
        gateways=section.gateways,
        gateway_key=read_secret(Path(api_key)) if api_key is not None else None,
        tls=_tls_files(section.tls),
        key=read_deployment_key(Path(kvd_key)) if kvd_key is not None else None,
        store=StoreOptions(
            memory_bytes=parse_bytes(section.memory, "--memory"),
            ssd=Path(section.ssd) if section.ssd is not None else None,
            ssd_bytes=parse_bytes(section.ssd_size, "kvd.ssd_size"),
            checkpoints=section.checkpoints,
        ),
        timeouts=section.timeouts,
        connections=section.connections,
    )


def _tls_files(section: TlsSection) -> TlsFiles | None:
    if (section.client_cert is None) != (section.client_key is None):
        raise InputError(
            "only one of the two is set", where="kvd.tls.client_cert, client_key", fix="set both"
        )
    if section.ca and section.cert and section.key:
        client_cert, client_key = section.client_cert, section.client_key
        return TlsFiles(
            Path(section.ca),
            Path(section.cert),
            Path(section.key),
            Path(client_cert or section.cert),
            Path(client_key or section.key),
        )
    if section != TlsSection():
        raise InputError(
            "mutual TLS needs all three",
            where="--tls-ca, --tls-cert, --tls-key",
            fix="give the missing ones",
        )
    return None


async def _serve(options: KvdOptions) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with run_kvd(options) as kvd:
        ready = KvdReady(str(kvd.store.node), str(kvd.socket), str(kvd.data), kvd.http_url)
        click.echo(readiness_line(ready))
        await stop.wait()
