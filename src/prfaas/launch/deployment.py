"""A deployment that runs on this machine: kvds, engines, relays and a gateway, started in order.

Leaving a context ends its processes. This module does not depend on what is served or displayed.
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
from prfaas.contracts.readiness import KvdReady
from prfaas.http_client.client import HttpClient, open_client
from prfaas.launch import commands
from prfaas.launch.children import Children
from prfaas.launch.commands import EngineSpec, Host

READY_S = 300.0  # for the gateway to use every node; the engines have started by then
POLL_S = 0.2  # between two polls of the gateway's state
REQUEST_S = 60.0  # for one response; only a process that hangs takes longer


def _ignore(what: str) -> None:
    """Does nothing with a progress message."""


@dataclass(frozen=True, slots=True)
class RunningHosts:
    """Engines with their kvds, and the relays between clusters. There is no gateway yet."""

    deployment: Deployment
    folder: Path
    engine_urls: Mapping[str, str]
    kvds: Mapping[str, KvdReady]
    relays: Mapping[str, str]  # for each host that a relay leads to, the relay's address
    children: Children


@dataclass(frozen=True, slots=True)
class RunningDeployment:
    """A deployment that accepts requests."""

    deployment: Deployment
    hosts: RunningHosts
    gateway_url: str
    http: HttpClient

    async def state(self) -> dict[str, Any]:
        """The gateway's state. Raises `PeerError`."""
        url = f"{self.gateway_url}/prfaas/v1/state"
        return await self.http.request_json("GET", url, dict[str, Any], timeout_s=REQUEST_S)


@asynccontextmanager
async def launched_hosts(
    deployment: Deployment,
    engines: EngineSpec,
    folder: Path,
    prefix: Sequence[str],
    *,
    say: Callable[[str], None] = _ignore,
    on_line: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[RunningHosts]:
    """Starts kvds, engines and relays. Raises `ChildDied`.

    `say` is called with what is being started, `on_line` with every line of the relays.
    `environment` is added to that of every process, gateways included."""
    hosts = commands.list_hosts(deployment)
    async with Children(folder, prefix, environment) as children:
        say(f"{len(hosts)} kvds")
        started = await children.start_all(
            [commands.kvd_command(host, folder, engines) for host in hosts]
        )
        kvds = {host.name: started[f"kvd-{host.name}"] for host in hosts}
        say(f"{len(hosts)} engines")
        nodes = await children.start_all(
            [
                commands.engine_command(host, folder, kvds[host.name], engines, _port_for(engines))
                for host in hosts
            ]
        )
        links = commands.relayed_links(deployment)
        if links:
            say("the links between clusters")
        announced = await children.start_all(
            [commands.relay_command(link, kvds, on_line) for link in links]
        )
        relays: dict[str, str] = {}
        for link in links:
            relays |= commands.relay_addresses(announced[link.name], link)
        urls = {name: node.http for name, node in nodes.items()}
        yield RunningHosts(deployment, folder, urls, kvds, relays, children)


@asynccontextmanager
async def single_engine(
    host: Host, engines: EngineSpec, folder: Path, prefix: Sequence[str]
) -> AsyncIterator[str]:
    """One engine with its kvd. Yields the engine's URL."""
    async with Children(folder, prefix) as children:
        kvd = await (await children.start(commands.kvd_command(host, folder, engines))).ready()
        port = _port_for(engines)
        command = commands.engine_command(host, folder, kvd, engines, port)
        yield (await (await children.start(command)).ready()).http


@asynccontextmanager
async def launched_gateway(
    hosts: RunningHosts,
    deployment: Deployment,
    options: Sequence[str] = (),
    *,
    say: Callable[[str], None] = _ignore,
    on_line: Callable[[str], None] | None = None,
) -> AsyncIterator[RunningDeployment]:
    """A gateway over as many of the hosts as `deployment` has instances. Other deployments of the
    same hosts may follow it. Raises `ChildDied`."""
    running = commands.with_nodes(deployment, hosts.engine_urls, hosts.kvds, hosts.relays)
    file = hosts.folder / "deployment.toml"
    file.write_text(deployment_toml(running), encoding="utf-8")
    say("the gateway")
    async with open_client() as http:
        for kvd in hosts.kvds.values():
            await _reset_role(http, kvd.http)
        child = await hosts.children.start(commands.gateway_command(file, options, on_line))
        try:
            live = RunningDeployment(running, hosts, (await child.ready()).http, http)
            await _wait_until_all_in_use(live)
            yield live
        finally:
            await hosts.children.end([child])


async def _reset_role(http: HttpClient, kvd_url: str) -> None:
    """A new gateway keeps the roles that it finds, and these may be another deployment's."""
    url = f"{kvd_url}/v1/role"
    role = await http.request_json("GET", url, dict[str, Any], timeout_s=REQUEST_S)
    body = msgspec.json.encode({**role, "role": "both"})
    await http.request("POST", url, timeout_s=REQUEST_S, body=body)


async def _wait_until_all_in_use(live: RunningDeployment) -> None:
    """Waits until the gateway uses every node."""
    nodes = len(commands.list_hosts(live.deployment))
    dying = asyncio.create_task(live.hosts.children.until_one_dies())
    try:
        async with asyncio.timeout(READY_S):
            while await _nodes_in_use(live) < nodes:
                done, _ = await asyncio.wait({dying}, timeout=POLL_S)
                if done:
                    raise dying.result()
    finally:
        dying.cancel()


async def _nodes_in_use(live: RunningDeployment) -> int:
    state = await live.state()
    return sum(
        node["alive"] and node.get("in_use", False)
        for cluster in state["clusters"]
        for node in cluster["nodes"]
    )


def _port_for(engines: EngineSpec) -> int:
    """A free port for vLLM, which cannot announce a port that the kernel chose; 0 for others."""
    if engines.kind != "vllm":
        return 0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
