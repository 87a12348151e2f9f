"""`prfaas node`: an engine with vLLM's HTTP API, attached to a kvd."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from prfaas.clock import MonotonicClock
from prfaas.config.host import NodeSection, load_host_config
from prfaas.contracts.readiness import NodeReady, readiness_line
from prfaas.engine.checkpoint.read_ahead import read_ahead
from prfaas.engine.emulated.pace import Scales
from prfaas.engine.start_phases import freeze_objects, start_phase
from prfaas.engine.warm_up import WHERE, warm_up
from prfaas.errors import EngineError, InputError
from prfaas.launch.attached_process import starting_kvd
from prfaas.launch.engine_choice import (
    ChosenEngine,
    EmulatedChoice,
    EngineChoice,
    emulated_engine,
    hf_engine,
    import_hf_engine,
)
from prfaas.node.process import KvdAddress, NodeCredentials, NodeSettings, run_node
from prfaas.security.exposure import Protection, refuse_exposure
from prfaas.security.reload import defer_hangup
from prfaas.security.tls import load_identity
from prfaas.service.allocator import limit_heap_growth
from prfaas.service.logging import LogFormat, configure_logging
from prfaas.text import load_tokenizer
from prfaas.tracing.otlp import check_endpoint

_DEFAULTS = NodeSection()
_LOG = logging.getLogger(__name__)


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
@click.option(
    "--warm-up",
    "warm_up_lengths",
    metavar="LENGTHS|none",
    help="Lengths of prompts, in tokens and separated by commas, that the engine runs before the "
    "node is ready: kernels are compiled and tuned then, and not within the first requests. "
    "`none` skips this.  [default: lengths up to two prefill steps on a GPU, else none]",
)
@click.option("--accelerator", help="Accelerator whose profile the emulated engine follows.")
@otlp_endpoint_option
@log_level_option
@log_format_option
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
    metrics_key_file: str | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool | None,
    device: str | None,
    warm_up_lengths: str | None,
    accelerator: str | None,
    otlp_endpoint: str | None,
    log_level: str,
    log_format: LogFormat,
    kvd_options: tuple[str, ...],
) -> None:
    """Serve a model with vLLM's API: completions, chats, /metrics; prefill or decode.

    State goes through a kvd: a running one (--kvd), or one that the node starts and ends. The
    options after `--` go to that one (see `prfaas kvd --help`), and so does --config. SIGTERM
    drains the node (docs/nodes.md), SIGHUP reads keys and certificates again. Other hosts reach a
    node with a member key and TLS only (`prfaas init` writes such host files). All keys are in
    docs/configuration.md.

    \b
      prfaas node --model ./tiny-kimi --port 8000
      prfaas node --model ./tiny-kimi --port 8000 --kvd /run/prfaas/kvd.sock
      prfaas node --model ./tiny-kimi -- --memory 8GiB
      prfaas node --model ./kimi --device cuda --warm-up 1000,8192,100000
      prfaas node --engine emulated --model case-study-1t --accelerator h200
    """
    began_s = time.monotonic()
    flags = {
        "node.engine": engine,
        "node.model": model,
        "node.name": name,
        "node.host": host,
        "node.port": port,
        "node.kvd_socket": kvd,
        "node.kvd_url": kvd_url,
        "node.member_key_file": member_key_file,
        "node.metrics_key_file": metrics_key_file,
        "node.tls.ca": tls_ca,
        "node.tls.cert": tls_cert,
        "node.tls.key": tls_key,
        "node.insecure": insecure,
        "node.device": device,
        "node.warm_up": _lengths(warm_up_lengths),
        "node.emulated.accelerator": accelerator,
        "node.otlp_endpoint": otlp_endpoint,
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
    if section.otlp_endpoint is not None:
        check_endpoint(section.otlp_endpoint)  # now, because loading a model takes minutes
    limit_heap_growth()
    configure_logging(log_level, log_format)
    defer_hangup()  # loading a model takes minutes
    settings = NodeSettings(
        section.name or Path(section.model).resolve().name,
        section.host,
        section.port,
        section.advertise,
        section.timeouts,
        keep_answers=section.keep_answers,
        otlp_endpoint=section.otlp_endpoint,
        credentials_poll_s=section.credentials_poll_s,
    )
    credentials = NodeCredentials(
        read_key(section.member_key_file),
        read_key(section.metrics_key_file),
        load_identity(section.tls, "node.tls"),
    )
    _refuse_exposure(section, credentials)
    tokenizer_folder = section.tokenizer or (section.model if section.engine == "hf" else None)
    tokenizer = None
    if tokenizer_folder is not None:
        with start_phase("read the tokenizer"):
            tokenizer = load_tokenizer(Path(tokenizer_folder))
    shared = (*_kvd_options(section), "--log-format", log_format)
    kvd_options = (*shared, *kvd_options)
    if config is not None:
        kvd_options = ("--config", str(config), *kvd_options)

    def announce(url: str) -> None:
        click.echo(readiness_line(NodeReady(settings.name, url)))
        _LOG.info("start: the node is ready after %.1f s", time.monotonic() - began_s)

    with ExitStack() as stack:
        wait_for_kvd = stack.enter_context(
            _kvd(section, kvd_options, host_config.kvd.timeouts.drain_s)
        )
        chosen, found = _start(section, section.model, wait_for_kvd)
        stack.callback(chosen.engine.close)
        _warm_up(chosen, section.warm_up)
        freeze_objects()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_node(chosen.engine, tokenizer, found, settings, credentials, announce))


def _lengths(text: str | None) -> list[int] | None:
    """The value of --warm-up. The ranges are checked with those of the file."""
    if text is None:
        return None
    if text.strip() == "none":
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{text!r} is not a list of lengths",
            where="--warm-up",
            fix="give token counts such as 1000,8192, or none",
        ) from None


def _start(
    section: NodeSection, model: str, wait_for_kvd: Callable[[], KvdAddress]
) -> tuple[ChosenEngine, KvdAddress]:
    """The kvd starts while this process imports its libraries and the disk reads the weights."""
    on_disk = section.engine == "hf"
    with read_ahead(Path(model)) if on_disk else nullcontext():
        if on_disk:
            import_hf_engine(section.device, section.kernel_cache)
        with start_phase("waited for the kvd") if section.kvd_socket is None else nullcontext():
            found = wait_for_kvd()
        return _engine(section, model), found


def _warm_up(chosen: ChosenEngine, wanted: Sequence[int] | None) -> None:
    named = wanted is not None
    lengths = chosen.default_warm_up if wanted is None else wanted
    if not lengths:
        return
    with _ended_by_sigterm():
        _LOG.info("start: warming up with prompts of %s tokens", ", ".join(map(str, lengths)))
        try:
            done = warm_up(chosen.engine, lengths, MonotonicClock(), named=named)
        except EngineError as error:
            fix = "see the log; a node whose engine does not work cannot be ready"
            raise InputError(str(error), where=WHERE, fix=fix) from error
    _LOG.info(
        "start: warmed up with %d lengths and %d sequences at once in %.1f s",
        len(done.lengths),
        done.together,
        done.seconds,
    )


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the body, and then the process, in the order in which a ready node ends."""

    def end(*_: object) -> None:
        _LOG.info("stopping: the node was not ready yet")
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse_exposure(section: NodeSection, credentials: NodeCredentials) -> None:
    protection = Protection(
        credentials.member_key is not None, credentials.tls is not None, section.insecure
    )
    refuse_exposure(section.host, protection, where="--host", key_flag="--member-key-file")


def _kvd_options(section: NodeSection) -> list[str]:
    """The options with which the node starts its own kvd: it has the node's credentials, and sends
    its spans where the node sends them."""
    tls = section.tls
    given = {
        "--member-key-file": section.member_key_file,
        "--metrics-key-file": section.metrics_key_file,
        "--tls-ca": tls.ca,
        "--tls-cert": tls.cert,
        "--tls-key": tls.key,
        "--otlp-endpoint": section.otlp_endpoint,
    }
    options = [word for flag, one in given.items() if one is not None for word in (flag, one)]
    return [*options, "--insecure"] if section.insecure else options


def _kvd(
    section: NodeSection, options: tuple[str, ...], drain_s: float
) -> AbstractContextManager[Callable[[], KvdAddress]]:
    if section.kvd_socket is not None:
        running = KvdAddress(section.kvd_socket, section.kvd_url)
        return nullcontext(lambda: running)
    return starting_kvd(options, drain_s)


def _engine(section: NodeSection, model: str) -> ChosenEngine:
    choice = EngineChoice(
        model, section.block_tokens, section.max_waiting, section.max_running, section.chunk_tokens
    )
    if section.engine == "hf":
        return hf_engine(choice, section.device, section.dtype, section.warm_up or ())
    emulated = section.emulated
    scales = Scales(emulated.time_scale, emulated.byte_scale, emulated.output_scale)
    catalog = [Path(path) for path in emulated.catalog]
    return emulated_engine(
        choice, EmulatedChoice(emulated.accelerator, emulated.gpus, catalog, scales)
    )
