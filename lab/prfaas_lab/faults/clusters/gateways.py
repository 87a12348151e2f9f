"""Starts the gateways of a deployment for fault injection.

One PD cluster has two gateways, of which the first makes plans. Several have one each. These reach
each other through a relay, so that a fault can cut the connection between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from prfaas.config import Deployment
from prfaas.config.deployment import GatewayEntry
from prfaas.config.write import deployment_toml
from prfaas.contracts.readiness import GatewayReady, RelayReady, parse_readiness
from prfaas.launch import commands
from prfaas.launch.children import Children, Command
from prfaas.launch.deployment import gateway_ports

PAIR = ("gateway-0", "gateway-1")  # of one PD cluster
RELAY = "wan-gateways"


@dataclass(frozen=True, slots=True)
class RunningGateways:
    urls: Mapping[str, str]  # by the name of the process
    commands: Mapping[str, Command[GatewayReady]]  # that start them again at their old addresses
    relay: str | None = None  # the name of the process between them; None: there is none


async def start_gateways(
    running: Deployment,
    children: Children,
    folder: Path,
    on_line: Callable[[str], None],
    say: Callable[[str], None],
) -> RunningGateways:
    """`running`: with the addresses of its nodes. Raises `ChildDied`."""
    homes = [cluster.name for cluster in running.of_kind("pd")]
    if len(homes) == 1:
        say("two gateways")
        return await _start_pair(running, children, folder, on_line)
    say(f"{len(homes)} gateways, one for each PD cluster, and the relay between them")
    ports = gateway_ports(homes, 0)
    running = commands.with_gateways(running, ports)
    relayed = await (await children.start(_relay_command(ports))).ready()
    listening = {
        home: f"http://{pair.listen}" for home, pair in zip(ports, relayed.addresses, strict=True)
    }
    starts = {}
    for home in homes:
        name = f"gateway-{home}"
        file = _write(folder, name, _as_reached_from(running, home, listening))
        starts[name] = commands.gateway_command(file, (), on_line, name=name, cluster=home)
    started = await children.start_all(list(starts.values()))
    return RunningGateways({name: ready.http for name, ready in started.items()}, starts, RELAY)


async def _start_pair(
    running: Deployment, children: Children, folder: Path, on_line: Callable[[str], None]
) -> RunningGateways:
    def gateway(name: str, port: int) -> Command[GatewayReady]:
        options = ["--port", str(port)]
        return commands.gateway_command(folder / f"{name}.toml", options, on_line, name=name)

    for name in PAIR:
        section = msgspec.structs.replace(running.gateway, plans=name == PAIR[0])
        _write(folder, name, msgspec.structs.replace(running, gateway=section))
    started = await children.start_all([gateway(name, 0) for name in PAIR])
    urls = {name: ready.http for name, ready in started.items()}
    return RunningGateways(
        urls, {name: gateway(name, urlsplit(url).port or 0) for name, url in urls.items()}
    )


def _as_reached_from(deployment: Deployment, home: str, relayed: Mapping[str, str]) -> Deployment:
    """The deployment whose other gateways are at the relay's addresses."""
    entries = [
        entry if entry.cluster == home else GatewayEntry(entry.cluster, relayed[entry.cluster])
        for entry in deployment.gateways
    ]
    return msgspec.structs.replace(deployment, gateways=entries)


def _relay_command(ports: Mapping[str, int]) -> Command[RelayReady]:
    arguments = ["wan", "--control"]
    for port in ports.values():
        arguments += ["--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{port}"]
    return Command(RELAY, arguments, partial(parse_readiness, kind=RelayReady))


def _write(folder: Path, name: str, deployment: Deployment) -> Path:
    file = folder / f"{name}.toml"
    file.write_text(deployment_toml(deployment), encoding="utf-8")
    return file
