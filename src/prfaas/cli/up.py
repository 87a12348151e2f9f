"""`prfaas up`: starts a deployment on this machine: real processes and an emulated WAN."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import RenderableType
from rich.live import Live as LiveDisplay

from prfaas.cli.deployment_options import scale_options
from prfaas.config import Deployment, load_deployment
from prfaas.display.console import console
from prfaas.display.deployment_table import live_view
from prfaas.display.regions_table import regions_view
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError, PeerError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import ChildDied
from prfaas.launch.deployment import RunningDeployment, launched_gateway, launched_hosts
from prfaas.launch.preparation import (
    CACHE,
    TINY_DEVICE,
    LaunchOptions,
    LaunchPlan,
    Wan,
    parse_wan,
    prepare_launch,
    tiny_deployment,
)
from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.launch.services.hosts import EngineKind
from prfaas.studies.simulation_cases import BASELINES

REFRESH_S = 1.0  # between two updates of the table
DEFAULT_PORT = 8080
HIGHEST_PORT = 65_535
VLLM_PYTHON = Path(".venv-vllm/bin/python")


@click.command()
@click.argument(
    "file", metavar="[DEPLOYMENT.toml]", required=False, type=click.Path(path_type=Path)
)
@click.option(
    "--engine",
    type=click.Choice(["hf", "emulated", "vllm"]),
    default="hf",
    show_default=True,
    help="Engine of the nodes: hf (transformers), emulated accelerators, or vLLM servers.",
)
@click.option(
    "--baseline",
    type=click.Choice(list(BASELINES)),
    help="Start this baseline of the deployment instead of the deployment.",
)
@click.option(
    "--policy",
    type=click.Choice(["paper", "adaptive", "local", "remote"]),
    help="Routing policy of the gateway.  [default: the policy of the deployment file]",
)
@click.option(
    "--advise", is_flag=True, help="Let the gateway report new plans without acting on them."
)
@scale_options
@click.option(
    "--wan",
    metavar="gbps=X,rtt_ms=Y",
    help="Rate and round trip of the emulated WAN, instead of those of the deployment file.",
)
@click.option(
    "--port",
    default=DEFAULT_PORT,
    show_default=True,
    help="Port of the gateway; 0 for any free one. Gateways of further pd clusters have the next "
    "ports.",
)
@click.option(
    "--one-gateway",
    is_flag=True,
    help="Start one gateway for all pd clusters, instead of one for each.",
)
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path),
    help=f"Python interpreter that has vLLM, for --engine vllm.  [default: {VLLM_PYTHON}]",
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path),
    help="Folder for the logs of all processes.  [default: a new temporary folder]",
)
def up(
    file: Path | None,
    engine: EngineKind,
    baseline: str | None,
    policy: str | None,
    advise: bool,
    time_scale: float,
    byte_scale: float,
    output_scale: float,
    wan: str | None,
    port: int,
    one_gateway: bool,
    vllm_python: Path | None,
    logs: Path | None,
) -> None:
    """Start a deployment on this machine: kvds, engines, an emulated WAN and a gateway.

    Without a file, the command serves a tiny Kimi-Linear model on one PrfaaS node, one PD prefill
    node and one PD decode node. The first run makes the model and measures its profile.

    With a file, the command starts one node for each instance of the deployment. Emulated engines
    take the times that `prfaas plan` takes, measured or estimated, multiplied by the scales. Each
    link between clusters has an emulated WAN of its own. Each pd cluster has its gateway.

    Ctrl-C stops all processes.

    \b
      prfaas up
      prfaas up --wan gbps=0.05,rtt_ms=80
      prfaas up configs/case_study.toml --engine emulated \\
                --time-scale 0.25 --byte-scale 0.002 --output-scale 0.02
      prfaas up configs/case_study.toml --engine emulated --baseline homogeneous ...
      prfaas up configs/two_by_two.toml --engine emulated \\
                --time-scale 0.5 --byte-scale 0.002 --output-scale 0.02
    """
    screen = console()
    options = LaunchOptions(
        engine,
        Scales(time_scale, byte_scale, output_scale),
        baseline,
        parse_wan(wan) if wan else Wan(),
        port,
        vllm_python or VLLM_PYTHON,
        device=TINY_DEVICE if file is None else None,
    )
    folder = logs or Path(tempfile.mkdtemp(prefix="prfaas-up-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        ready = prepare(file, options, folder, screen.print, one_gateway=one_gateway)
    except InputError:
        with suppress(OSError):
            folder.rmdir()  # fails where the folder is not empty
        raise
    gateway_options = ["--policy", policy] if policy else []
    gateway_options += ["--advise"] if advise else []
    gateway_options += ["--console"] if _has_console(ready.deployment) else []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(ready, folder, gateway_options, together=one_gateway))
        except ChildDied as error:
            raise click.ClickException(str(error)) from None
        except PeerError as error:
            raise click.ClickException(f"{error}; the logs are in {folder}") from None


def prepare(
    file: Path | None,
    options: LaunchOptions,
    folder: Path,
    say: Callable[[str], None],
    *,
    one_gateway: bool = False,
) -> LaunchPlan:
    if options.engine == "vllm" and (options.python is None or not options.python.is_file()):
        raise InputError(
            f"{options.python}: no such file",
            where="--vllm-python",
            fix="name an interpreter that has vLLM, or install one: make .venv-vllm/.ready",
        )
    check_ports(options.port, 1)
    if file is not None:
        deployment = load_deployment(file)
        check_ports(options.port, 1 if one_gateway else len(deployment.of_kind("pd")))
        return prepare_launch(deployment, file, options, folder)
    deployment, profile = asyncio.run(tiny_deployment(CACHE, options, say))
    return prepare_launch(deployment, profile, options, folder)


def check_ports(first: int, gateways: int) -> None:
    """Whether so many gateways have ports from this one on; 0: free ones."""
    highest = HIGHEST_PORT + 1 - gateways
    if not 0 <= first <= highest:
        several = f" with {gateways} gateways, which take consecutive ports" if gateways > 1 else ""
        raise InputError(
            f"{first} is out of range{several}",
            where="--port",
            fix=f"give a port from 1 to {highest}, or 0 for any free one",
        )


async def _serve(
    ready: LaunchPlan, folder: Path, gateway_options: list[str], *, together: bool
) -> None:
    screen = console()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    outcomes = RequestOutcomes()

    def say(what: str) -> None:
        screen.print(f"starting {what}")

    async def serve() -> None:
        async with (
            launched_hosts(
                ready.deployment, ready.engines, folder, attached_prefix(), say=say
            ) as hosts,
            launched_gateway(
                hosts,
                ready.deployment,
                gateway_options,
                say=say,
                on_line=outcomes.read_line,
                together=together,
            ) as live,
        ):
            screen.print(_where(live), soft_wrap=True, markup=False)
            await _show(live, outcomes)

    serving = asyncio.create_task(serve())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not serving.done():
            screen.print("stopping")
            serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


def _where(live: RunningDeployment) -> str:
    """The URLs, the folder of logs, and two requests to try."""
    name = live.deployment.model.name
    prompt = '"Once upon a time"' if live.deployment.gateway.tokenizer else "[72, 105, 33]"
    body = f'{{"model": "{name}", "prompt": {prompt}, "max_tokens": 20}}'
    nodes = "\n".join(f"  {node:12} {url}" for node, url in live.hosts.engine_urls.items())
    ask = f"/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    console_at = ""
    if _has_console(live.deployment):
        pages = ", ".join(f"{url}/" for url in _gateways(live))
        console_at = f"the console, for a browser: {pages}\n"
    asked = "\n".join(f"curl {url}{ask}" for url in _gateways(live))
    return (
        f"\nserving {name} at {_served_at(live)}\n{nodes}\n"
        f"{console_at}"
        f"logs and the deployment file: {live.hosts.folder}\n\n"
        f"{asked}\n"
        f"curl {live.gateway_url}/prfaas/v1/state\n"
    )


def _has_console(deployment: Deployment) -> bool:
    """False where no operator could log in."""
    section = deployment.gateway
    return not section.keys or section.operator_key_file is not None


def _gateways(live: RunningDeployment) -> list[str]:
    return list(dict.fromkeys(live.gateway_urls.values()))


def _served_at(live: RunningDeployment) -> str:
    if len(_gateways(live)) == 1:
        return live.gateway_url
    return ", ".join(f"{url} ({home})" for home, url in live.gateway_urls.items())


async def _show(live: RunningDeployment, outcomes: RequestOutcomes) -> None:
    """Shows the table until cancelled, on a terminal only. Raises `ChildDied` when a process
    exits."""
    dying = asyncio.create_task(live.hosts.children.until_one_dies())
    screen = console()
    try:
        if not screen.is_terminal:
            raise await dying
        with LiveDisplay(console=screen, auto_refresh=False) as display:
            while not dying.done():
                display.update(_view(await live.states(), outcomes), refresh=True)
                await asyncio.wait({dying}, timeout=REFRESH_S)
        raise dying.result()
    finally:
        dying.cancel()


def _view(states: Mapping[str, Mapping[str, Any]], outcomes: RequestOutcomes) -> RenderableType:
    if len(states) == 1:
        (state,) = states.values()
        return live_view(state, outcomes)
    return regions_view(states, outcomes)
