"""`prfaas kvd`: keeps and moves KV for the engines of one host."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click
import uvloop

from prfaas.cli.logs import log_at, log_level_option
from prfaas.config.address import parse_address
from prfaas.config.sizes import format_bytes, parse_bytes
from prfaas.errors import InputError
from prfaas.kvd.process import KvdOptions, RunningKvd, TlsFiles, run_kvd
from prfaas.kvd.store import StoreOptions
from prfaas.kvd.transfers.incoming import TransferOptions
from prfaas.launch.allocator import steady_heap
from prfaas.security.deployment_key import read_deployment_key
from prfaas.security.secret_file import read_secret

_STORE = StoreOptions()
_TRANSFERS = TransferOptions()


@click.command()
@click.option("--socket", required=True, type=click.Path(path_type=Path), help="For engines.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="For KV of other hosts.")
@click.option("--http", default="127.0.0.1:0", show_default=True, help="For gateways.")
@click.option("--memory", default=format_bytes(_STORE.memory_bytes), show_default=True)
@click.option("--ssd", type=click.Path(path_type=Path), help="Folder for what memory cannot hold.")
@click.option("--ssd-size", default=format_bytes(_STORE.ssd_bytes), show_default=True)
@click.option("--checkpoints", default=_STORE.checkpoints, show_default=True)
@click.option("--node", help="Name in cache events; the data address when absent.")
@click.option("--advertise", metavar="HOST", help="This host as others reach it.")
@click.option("--via", metavar="HOST:PORT", help="A relay that senders use instead of --listen.")
@click.option("--gateway", "gateways", multiple=True, metavar="URL", help="Register there.")
@click.option("--gateway-key", type=click.Path(path_type=Path), help="File: a key it knows.")
@click.option("--cluster", metavar="NAME", help="Of the deployment; registering needs it.")
@click.option("--ca", type=click.Path(path_type=Path), help="CA certificate, for mutual TLS.")
@click.option("--cert", type=click.Path(path_type=Path), help="This host's certificate.")
@click.option("--key", type=click.Path(path_type=Path), help="Its key.")
@click.option("--key-file", type=click.Path(path_type=Path), help="Shared key of --http.")
@click.option("--client-cert", type=click.Path(path_type=Path), help="For sending; else --cert.")
@click.option("--client-key", type=click.Path(path_type=Path), help="Its key.")
@click.option("--grant-s", default=_TRANSFERS.grant_s, show_default=True, help="Until a frame.")
@click.option(
    "--dispatch-s", default=_TRANSFERS.dispatch_s, show_default=True, help="Until a poll."
)
@log_level_option
def kvd(
    socket: Path,
    listen: str,
    http: str,
    memory: str,
    ssd: Path | None,
    ssd_size: str,
    checkpoints: str,
    node: str | None,
    advertise: str | None,
    via: str | None,
    gateways: tuple[str, ...],
    gateway_key: Path | None,
    cluster: str | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    key_file: Path | None,
    client_cert: Path | None,
    client_key: Path | None,
    grant_s: float,
    dispatch_s: float,
    log_level: str,
) -> None:
    """Own the KV of this host's engines: a prefix pool in shared memory (and on SSD), transfers to
    and from other hosts, an API for gateways.

    \b
      prfaas kvd --socket /run/prfaas/kvd.sock --listen 0.0.0.0:7400 --http 0.0.0.0:7401 \\
                 --memory 64GiB --ssd /nvme/prfaas --ssd-size 1TB \\
                 --cluster pd --gateway http://gw:8080

    Port 0: any free one; the first line of output says which.
    """
    tls = _tls(ca, cert, key, client_cert, client_key)
    if via is not None:
        parse_address(via, "--via")
    if gateways and cluster is None:
        raise InputError(
            "which cluster?", where="--gateway", fix="give --cluster, as the deployment names it"
        )
    for flag, seconds in (("--grant-s", grant_s), ("--dispatch-s", dispatch_s)):
        if seconds <= 0:
            raise InputError(f"{seconds:g} s", where=flag, fix="give more than 0")
    options = KvdOptions(
        socket=socket,
        listen=parse_address(listen, "--listen", any_port=True),
        http=parse_address(http, "--http", any_port=True),
        node=node,
        advertise=advertise,
        via=via,
        cluster=cluster or "",
        gateways=gateways,
        gateway_key=read_secret(gateway_key) if gateway_key is not None else None,
        tls=tls,
        key=read_deployment_key(key_file) if key_file is not None else None,
        store=StoreOptions(
            memory_bytes=parse_bytes(memory, "--memory"),
            ssd=ssd,
            ssd_bytes=parse_bytes(ssd_size, "--ssd-size"),
            checkpoints=checkpoints,
        ),
        transfers=TransferOptions(grant_s=grant_s, dispatch_s=dispatch_s),
    )
    log_at(log_level)
    steady_heap()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options))


def _tls(
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    client_cert: Path | None,
    client_key: Path | None,
) -> TlsFiles | None:
    if (client_cert is None) != (client_key is None):
        raise InputError("one without the other", where="--client-cert, --client-key")
    if ca and cert and key:
        return TlsFiles(ca, cert, key, client_cert or cert, client_key or key)
    if ca or cert or key or client_cert:
        raise InputError("mutual TLS needs all three", where="--ca, --cert, --key", fix="give all")
    return None


async def _serve(options: KvdOptions) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with run_kvd(options) as here:
        click.echo(_where(here))
        await stop.wait()


def _where(here: RunningKvd) -> str:
    return f"kvd: socket {here.socket}, data {here.data}, http {here.http_url}"
