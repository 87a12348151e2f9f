"""`prfaas node`: an engine with vLLM's HTTP API, attached to a kvd."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import click
import uvloop

from prfaas.cli.shared_options import configure_logging, log_level_option, set_option
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
from prfaas.node.process import KvdAddress, NodeSettings, run_node
from prfaas.security.deployment_key import read_deployment_key
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
@click.option(
    "--kvd-key-file", metavar="FILE", help="File with the key that kvds of the deployment share."
)
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
    kvd_key_file: str | None,
    device: str | None,
    accelerator: str | None,
    log_level: str,
    kvd_options: tuple[str, ...],
) -> None:
    """Serve a model with vLLM's API: completions, chats, /metrics, KV events; prefill or decode.

    State goes through a kvd: a running one (--kvd), or one that the node starts and ends. The
    options after `--` go to that one (see `prfaas kvd --help`), and so does --config. SIGTERM
    drains the node. All keys are in docs/configuration.md.

    \b
      prfaas node --model ./tiny-kimi --port 8000
      prfaas node --model ./tiny-kimi --port 8000 --kvd /run/prfaas/kvd.sock
      prfaas node --model ./tiny-kimi -- --memory 8GiB --cluster pd --gateway http://gw:8080
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
        "node.kvd_key_file": kvd_key_file,
        "node.device": device,
        "node.emulated.accelerator": accelerator,
    }
    section = load_host_config(config, assignments, flags).node
    if section.model is None:
        raise InputError("is required", where="--model", fix="give it, or node.model in the file")
    if section.kvd_socket is not None and kvd_options:
        raise InputError(
            f"the node starts no kvd, so it cannot use {' '.join(kvd_options)}",
            where="--kvd",
            fix="give these options to the running kvd",
        )
    configure_logging(log_level)
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
    tokenizer_folder = section.tokenizer or (section.model if section.engine == "hf" else None)
    tokenizer = load_tokenizer(Path(tokenizer_folder)) if tokenizer_folder is not None else None
    key_file = section.kvd_key_file
    key = read_deployment_key(Path(key_file)) if key_file is not None else None
    if key_file is not None:
        kvd_options = ("--kvd-key-file", key_file, *kvd_options)
    if config is not None:
        kvd_options = ("--config", str(config), *kvd_options)

    def announce(url: str) -> None:
        click.echo(readiness_line(NodeReady(settings.name, url)))

    with _kvd(section, kvd_options) as found:
        place = replace(found, key=key)
        chosen = _engine(section, section.model)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run_node(chosen, tokenizer, place, settings, announce))
        finally:
            chosen.close()


def _kvd(section: NodeSection, options: tuple[str, ...]) -> AbstractContextManager[KvdAddress]:
    if section.kvd_socket is not None:
        return nullcontext(KvdAddress(section.kvd_socket, section.kvd_url))
    return attached_kvd(options)


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
