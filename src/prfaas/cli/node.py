"""`prfaas node`: an engine with vLLM's HTTP API, attached to a kvd."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click
import uvloop

from prfaas.cli.shared_options import (
    configure_logging,
    log_level_option,
    read_key,
    security_options,
    set_option,
)
from prfaas.config.host import NodeSection, load_host_config
from prfaas.contracts.readiness import NodeReady, readiness_line
from prfaas.engine.api import Engine
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.allocator import limit_heap_growth
from prfaas.launch.attached_process import attached_kvd
from prfaas.launch.engine_choice import (
    EmulatedChoice,
    EngineChoice,
    emulated_engine,
    hf_engine,
)
from prfaas.node.process import KvdAddress, NodeCredentials, NodeSettings, run_node
from prfaas.security.exposure import Protection, is_loopback, refuse_exposure
from prfaas.security.reload import defer_hangup
from prfaas.security.tls import load_identity
from prfaas.text import load_tokenizer

_DEFAULTS = NodeSection()


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Host file; this command reads its [node] section.",
)
@set_option
@click.option(
    "--engine",
    type=click.Choice(["hf", "emulated"]),
    help="Engine: computes a Hugging Face checkpoint (hf), or follows a profile (emulated).  "
    f"[default: {_DEFAULTS.engine}]",
)
@click.option("--model", help="Checkpoint folder; for --engine emulated a model of the catalog.")
@click.option("--name", help="Model name in the API; by default the name of folder or model.")
@click.option("--host", help=f"Address to listen on.  [default: {_DEFAULTS.host}]")
@click.option(
    "--port",
    type=int,
    help=f"Port to listen on; 0 chooses a free one.  [default: {_DEFAULTS.port}]",
)
@click.option("--kvd", metavar="SOCKET", help="Socket of a running kvd; without it one is started.")
@click.option("--kvd-url", metavar="URL", help="HTTP address of that kvd.")
@security_options
@click.option("--device", help="Device of the hf engine: cpu, cuda or cuda:N.")
@click.option("--accelerator", help="Accelerator whose profile the emulated engine follows.")
@log_level_option
@click.argument("kvd_options", nargs=-1, type=click.UNPROCESSED)
def node(
    config: Path | None,
    assignments: tuple[str, ...],
    engine: str | None,
    model: str | None,
    name: str | None,
    host: str | None,
    port: int | None,
    kvd: str | None,
    kvd_url: str | None,
    member_key_file: str | None,
    operator_key_file: str | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool | None,
    device: str | None,
    accelerator: str | None,
    log_level: str,
    kvd_options: tuple[str, ...],
) -> None:
    """Serve a model with vLLM's API: completions, chats, /metrics, KV events; prefill or decode.

    State goes through a kvd: a running one (--kvd), or one that the node starts and ends. The
    options after `--` go to that one (see `prfaas kvd --help`), and so does --config. SIGTERM
    drains the node (docs/nodes.md), SIGHUP reads keys and certificates again. Other hosts reach a
    node with a member key and TLS only (`prfaas init` writes such host files). All keys are in
    docs/configuration.md.

    \b
      prfaas node --model ./tiny-kimi --port 8000
      prfaas node --model ./tiny-kimi --port 8000 --kvd /run/prfaas/kvd.sock
      prfaas node --model ./tiny-kimi -- --memory 8GiB
      prfaas node --engine emulated --model case-study-1t --accelerator h200
    """
    flags = {
        "node.engine": engine,
        "node.model": model,
        "node.name": name,
        "node.host": host,
        "node.port": port,
        "node.kvd_socket": kvd,
        "node.kvd_url": kvd_url,
        "node.member_key_file": member_key_file,
        "node.operator_key_file": operator_key_file,
        "node.tls.ca": tls_ca,
        "node.tls.cert": tls_cert,
        "node.tls.key": tls_key,
        "node.insecure": insecure,
        "node.device": device,
        "node.emulated.accelerator": accelerator,
    }
    host_config = load_host_config(config, assignments, flags)
    section = host_config.node
    if section.model is None:
        raise InputError("is required", where="--model", fix="give it, or node.model in the file")
    if section.kvd_socket is not None and kvd_options:
        raise InputError(
            f"the node starts no kvd, so it cannot use {' '.join(kvd_options)}",
            where="--kvd",
            fix="give these options to the running kvd",
        )
    configure_logging(log_level)
    defer_hangup()  # loading a model takes minutes
    limit_heap_growth()
    settings = NodeSettings(
        section.name or Path(section.model).resolve().name,
        section.host,
        section.port,
        section.advertise,
        section.events,
        section.replay,
        section.timeouts,
    )
    credentials = NodeCredentials(
        read_key(section.member_key_file),
        read_key(section.operator_key_file),
        load_identity(section.tls, "node.tls"),
    )
    _refuse_exposure(section, credentials)
    tokenizer_folder = section.tokenizer or (section.model if section.engine == "hf" else None)
    tokenizer = load_tokenizer(Path(tokenizer_folder)) if tokenizer_folder is not None else None
    kvd_options = (*_credential_options(section), *kvd_options)
    if config is not None:
        kvd_options = ("--config", str(config), *kvd_options)

    def announce(url: str) -> None:
        click.echo(readiness_line(NodeReady(settings.name, url)))

    with _kvd(section, kvd_options, host_config.kvd.timeouts.drain_s) as found:
        chosen = _engine(section, section.model)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run_node(chosen, tokenizer, found, settings, credentials, announce))
        finally:
            chosen.close()


def _refuse_exposure(section: NodeSection, credentials: NodeCredentials) -> None:
    protection = Protection(
        credentials.member_key is not None, credentials.tls is not None, section.insecure
    )
    refuse_exposure(section.host, protection, where="--host", key_flag="--member-key-file")
    for name, endpoint in (("events", section.events), ("replay", section.replay)):
        # KV events have no credentials of their own, whatever protects the HTTP API.
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if endpoint.startswith("tcp://") and not section.insecure and not is_loopback(host):
            raise InputError(
                f"other hosts could read the cache events at {endpoint}",
                where=f"node.{name}",
                fix="use tcp://127.0.0.1:PORT or ipc://PATH, or accept the risk with --insecure",
            )


def _credential_options(section: NodeSection) -> list[str]:
    """The options with which the node starts its own kvd: it has the node's credentials."""
    tls = section.tls
    given = {
        "--member-key-file": section.member_key_file,
        "--operator-key-file": section.operator_key_file,
        "--tls-ca": tls.ca,
        "--tls-cert": tls.cert,
        "--tls-key": tls.key,
    }
    options = [word for flag, file in given.items() if file is not None for word in (flag, file)]
    return [*options, "--insecure"] if section.insecure else options


def _kvd(
    section: NodeSection, options: tuple[str, ...], drain_s: float
) -> AbstractContextManager[KvdAddress]:
    if section.kvd_socket is not None:
        return nullcontext(KvdAddress(section.kvd_socket, section.kvd_url))
    return attached_kvd(options, drain_s)


def _engine(section: NodeSection, model: str) -> Engine:
    choice = EngineChoice(
        model, section.block_tokens, section.max_waiting, section.max_running, section.chunk_tokens
    )
    if section.engine == "hf":
        return hf_engine(choice, section.device, section.dtype)
    emulated = section.emulated
    scales = Scales(emulated.time_scale, emulated.byte_scale, emulated.output_scale)
    catalog = [Path(path) for path in emulated.catalog]
    return emulated_engine(
        choice, EmulatedChoice(emulated.accelerator, emulated.gpus, catalog, scales)
    )
