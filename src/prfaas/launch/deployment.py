"""A deployment as it runs on this machine: kvds, engines, relays, a gateway, brought up in order.

Leaving ends all of them. Knows nothing of what is served, or of how it is shown.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prfaas.config import Deployment
from prfaas.config.write import deployment_toml
from prfaas.http_client.client import HttpClient, open_client
from prfaas.launch import commands
from prfaas.launch.children import Children
from prfaas.launch.commands import Engines, Host, KvdAt

READY_S = 300.0  # for the gateway to see every node; engines have started by then
LOOK_S = 0.2  # between two looks at it
ASK_S = 60.0  # for one answer; only a process that hangs takes longer


def _nothing(what: str) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Engines with their kvds, and relays between their clusters; no gateway yet."""

    deployment: Deployment
    folder: Path
    engine_urls: Mapping[str, str]
    kvds: Mapping[str, KvdAt]
    relays: Mapping[str, str]  # of a link between clusters: its address for each host it leads to
    children: Children


@dataclass(frozen=True, slots=True)
class Live:
    """A deployment that takes requests."""

    deployment: Deployment
    hosts: Hosts
    gateway_url: str
    http: HttpClient

    async def state(self) -> dict[str, Any]:
        """Raises `PeerError`."""
        url = f"{self.gateway_url}/prfaas/v1/state"
        return await self.http.request_json("GET", url, dict[str, Any], timeout_s=ASK_S)


@asynccontextmanager
async def launched_hosts(
    deployment: Deployment,
    engines: Engines,
    folder: Path,
    tether: Sequence[str],
    *,
    say: Callable[[str], None] = _nothing,
    heard: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Hosts]:
    """`say` is told what is being waited for, `heard` every line of the relays. `environment` is
    added to that of every process, gateways included. Raises `ChildDied`."""
    everybody = commands.hosts(deployment)
    async with Children(folder, tether, environment) as children:
        say(f"{len(everybody)} kvds")
        said = await children.started([commands.kvd(host, folder, engines) for host in everybody])
        kvds = {host.name: commands.parse_kvd(said[f"kvd-{host.name}"]) for host in everybody}
        say(f"{len(everybody)} engines")
        ports = {host.name: _free_port() if engines.kind == "vllm" else 0 for host in everybody}
        urls = await children.started(
            [
                commands.engine(host, folder, kvds[host.name], engines, ports[host.name])
                for host in everybody
            ]
        )
        if engines.kind == "vllm":
            urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        ways = commands.ways(deployment)
        if ways:
            say("the links between clusters")
        said = await children.started([commands.relay(way, kvds, heard) for way in ways])
        relays: dict[str, str] = {}
        for way in ways:
            relays |= commands.parse_relay(said[way.name], way)
        yield Hosts(deployment, folder, urls, kvds, relays, children)


@asynccontextmanager
async def serving_alone(
    host: Host, engines: Engines, folder: Path, tether: Sequence[str]
) -> AsyncIterator[str]:
    """One engine with its kvd; where it is."""
    async with Children(folder, tether) as children:
        said = await children.started([commands.kvd(host, folder, engines)])
        kvd = commands.parse_kvd(said[f"kvd-{host.name}"])
        port = _free_port() if engines.kind == "vllm" else 0
        urls = await children.started([commands.engine(host, folder, kvd, engines, port)])
        yield f"http://127.0.0.1:{port}" if port else urls[host.name]


@asynccontextmanager
async def launched_gateway(
    hosts: Hosts,
    deployment: Deployment,
    options: Sequence[str] = (),
    *,
    say: Callable[[str], None] = _nothing,
    heard: Callable[[str], None] | None = None,
) -> AsyncIterator[Live]:
    """A gateway over as many of the hosts as `deployment` has instances. Other deployments of the
    same hosts may follow it. Raises `ChildDied`."""
    running = commands.with_nodes(deployment, hosts.engine_urls, hosts.kvds, hosts.relays)
    file = hosts.folder / "deployment.toml"
    file.write_text(deployment_toml(running), encoding="utf-8")
    say("the gateway")
    async with open_client() as http:
        for kvd in hosts.kvds.values():
            await _forget_role(http, kvd.url)
        child = await hosts.children.start(commands.gateway(file, options, heard))
        try:
            live = Live(running, hosts, await child.ready(), http)
            await _all_seen(live)
            yield live
        finally:
            await hosts.children.end([child])


async def _forget_role(http: HttpClient, kvd_url: str) -> None:
    """A new gateway keeps the roles it finds, and these may be another deployment's."""
    url = f"{kvd_url}/v1/role"
    role = await http.request_json("GET", url, dict[str, Any], timeout_s=ASK_S)
    body = msgspec.json.encode({**role, "role": "both"})
    await http.request("POST", url, timeout_s=ASK_S, body=body)


async def _all_seen(live: Live) -> None:
    """Until the gateway has heard of every node and knows its role."""
    nodes = len(commands.hosts(live.deployment))
    dying = asyncio.create_task(live.hosts.children.until_one_dies())
    try:
        async with asyncio.timeout(READY_S):
            while await _seen(live) < nodes:
                done, _ = await asyncio.wait({dying}, timeout=LOOK_S)
                if done:
                    raise dying.result()
    finally:
        dying.cancel()


async def _seen(live: Live) -> int:
    state = await live.state()
    return sum(
        node["alive"] and node.get("in_use", False)
        for cluster in state["clusters"]
        for node in cluster["nodes"]
    )


def _free_port() -> int:
    """For servers that cannot choose one and say which."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
