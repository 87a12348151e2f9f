"""`prfaas node`: an engine behind vLLM's HTTP surface, attached to its kvd."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click
import uvloop

from prfaas.cli.logs import log_at, log_level_option
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.allocator import steady_heap
from prfaas.launch.attached_process import child_kvd
from prfaas.launch.engine_choice import (
    EmulatedChoice,
    EngineChoice,
    emulated_engine,
    hf_engine,
)
from prfaas.node.process import KvdAddress, NodeSettings, run_node
from prfaas.security.deployment_key import read_deployment_key
from prfaas.text import load_tokenizer

DEFAULT_BLOCK_TOKENS = 64
DEFAULT_MAX_WAITING = 256
DEFAULT_GPUS = 8
_SETTINGS, _SCALES = NodeSettings(name=""), Scales()  # for their defaults


@click.command()
@click.option("--engine", type=click.Choice(["hf", "emulated"]), default="hf", show_default=True)
@click.option("--model", required=True, help="A checkpoint directory; emulated: a catalog name.")
@click.option("--name", help="What clients call the model; the directory's or catalog's own.")
@click.option("--host", default=_SETTINGS.host, show_default=True)
@click.option("--port", default=_SETTINGS.port, show_default=True, help="0: any free one.")
@click.option("--advertise", metavar="URL", help="Where gateways reach this node, if elsewhere.")
@click.option("--kvd", metavar="SOCKET", help="A kvd that runs already; else one is started.")
@click.option("--kvd-url", metavar="URL", help="Its HTTP address, for gateways and KV events.")
@click.option("--kvd-key-file", type=click.Path(path_type=Path), help="Shared key of that.")
@click.option("--block-tokens", default=DEFAULT_BLOCK_TOKENS, show_default=True)
@click.option("--chunk-tokens", type=int, help="Of a prefill; the engine's choice when absent.")
@click.option("--max-running", type=int, help="Sequences decoded together.")
@click.option("--max-waiting", default=DEFAULT_MAX_WAITING, show_default=True)
@click.option("--device", help="hf: cpu, cuda or cuda:N; the best there is when absent.")
@click.option("--dtype", help="hf: float32, bfloat16 or float16.")
@click.option("--accelerator", help="emulated: whose profile.")
@click.option("--gpus", default=DEFAULT_GPUS, show_default=True, help="emulated: of it.")
@click.option("--catalog", multiple=True, type=click.Path(path_type=Path), help="emulated: more.")
@click.option("--time-scale", default=_SCALES.time, show_default=True)
@click.option("--byte-scale", default=_SCALES.bytes, show_default=True)
@click.option("--output-scale", default=_SCALES.output, show_default=True)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Directory; hf: the model's.")
@click.option("--events", default=_SETTINGS.events, show_default=True, help="KV events (ZMQ).")
@click.option("--replay", default=_SETTINGS.replay, show_default=True, help="Their replay.")
@click.option("--drain-s", default=_SETTINGS.drain_s, show_default=True, help="After SIGTERM.")
@click.option("--leave-s", default=_SETTINGS.leave_s, show_default=True, help="At least, then.")
@log_level_option
@click.argument("kvd_options", nargs=-1, type=click.UNPROCESSED)
def node(
    engine: str,
    model: str,
    name: str | None,
    host: str,
    port: int,
    advertise: str | None,
    kvd: str | None,
    kvd_url: str | None,
    kvd_key_file: Path | None,
    block_tokens: int,
    chunk_tokens: int | None,
    max_running: int | None,
    max_waiting: int,
    device: str | None,
    dtype: str | None,
    accelerator: str | None,
    gpus: int,
    catalog: tuple[Path, ...],
    time_scale: float,
    byte_scale: float,
    output_scale: float,
    tokenizer: Path | None,
    events: str,
    replay: str,
    drain_s: float,
    leave_s: float,
    log_level: str,
    kvd_options: tuple[str, ...],
) -> None:
    """Serve a model as vLLM would: completions, chats, /metrics, KV events; prefill or decode.

    State goes through a kvd: one that runs already (--kvd), or one of the node's own, which ends
    with it and takes the options behind `--` (see `prfaas kvd --help`). SIGTERM drains.

    \b
      prfaas node --model ./tiny-kimi --port 8000
      prfaas node --model ./tiny-kimi --port 8000 --kvd /run/prfaas/kvd.sock
      prfaas node --model ./tiny-kimi -- --memory 8GiB --cluster pd --gateway http://gw:8080
      prfaas node --engine emulated --model case-study-1t --accelerator h200 --gpus 8
    """
    if kvd is not None and kvd_options:
        raise InputError(
            f"options for a kvd of the node's own: {' '.join(kvd_options)}",
            where="--kvd",
            fix="give them to that kvd",
        )
    log_at(log_level)
    steady_heap()
    choice = EngineChoice(model, block_tokens, max_waiting, max_running, chunk_tokens)
    scales = Scales(time_scale, byte_scale, output_scale)
    settings = NodeSettings(
        name=name or Path(model).resolve().name,
        host=host,
        port=port,
        advertise=advertise,
        events=events,
        replay=replay,
        drain_s=drain_s,
        leave_s=leave_s,
    )
    words_in = tokenizer or (Path(model) if engine == "hf" else None)
    words = load_tokenizer(words_in) if words_in is not None else None
    key = read_deployment_key(kvd_key_file) if kvd_key_file is not None else None
    if kvd_key_file is not None:
        kvd_options = ("--key-file", str(kvd_key_file), *kvd_options)
    with nullcontext(KvdAddress(kvd, kvd_url)) if kvd else child_kvd(kvd_options) as found:
        place = replace(found, key=key)
        if engine == "hf":
            computing = hf_engine(choice, device, dtype)
        else:
            computing = emulated_engine(choice, EmulatedChoice(accelerator, gpus, catalog, scales))
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(
                    run_node(
                        computing,
                        words,
                        place,
                        settings,
                        lambda url: click.echo(f"serving {settings.name} at {url}"),
                    )
                )
        finally:
            computing.close()
