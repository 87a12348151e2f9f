"""A deployment that runs on this machine: kvds, engines, relays and gateways, started in order.

Leaving a context ends its processes. This module does not depend on what is served or displayed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
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
from prfaas.launch.services.hosts import EngineSpec, Host, list_hosts

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
    # For each host that relays lead to, the address of the relay from each cluster that sends.
    relays: Mapping[str, Mapping[str, str]]
    children: Children


@dataclass(frozen=True, slots=True)
class RunningDeployment:
    """A deployment that accepts requests."""

    deployment: Deployment
    hosts: RunningHosts
    gateway_urls: Mapping[str, str]  # by PD cluster; the same for all where one gateway serves all
    http: HttpClient

    @property
    def gateway_url(self) -> str:
        """The gateway of the first PD cluster, which is the only one of most deployments."""
        return next(iter(self.gateway_urls.values()))

    async def state(self) -> dict[str, Any]:
        """The state of the gateway at `gateway_url`. Raises `PeerError`."""
        return await self._state_of(self.gateway_url)

    async def states(self) -> dict[str, dict[str, Any]]:
        """The state of the gateway of each PD cluster, asked together. Raises `PeerError`."""
        urls = list(dict.fromkeys(self.gateway_urls.values()))
        found = dict(zip(urls, await asyncio.gather(*map(self._state_of, urls)), strict=True))
        return {home: found[url] for home, url in self.gateway_urls.items()}

    async def _state_of(self, gateway_url: str) -> dict[str, Any]:
        url = f"{gateway_url}/prfaas/v1/state"
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
    hosts = list_hosts(deployment)
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
        relays: dict[str, dict[str, str]] = {}
        for link in links:
            for name, address in commands.relay_addresses(announced[link.name], link).items():
                relays.setdefault(name, {})[link.link.source] = address
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
    together: bool = False,
) -> AsyncIterator[RunningDeployment]:
    """Gateways over as many of the hosts as `deployment` has instances: one for each PD cluster, or
    with `together` one for all. Other deployments of the same hosts may follow it. Raises
    `ChildDied`.

    With one gateway its port is that of the deployment. With several, the first has this port and
    each other one the next; all are free ones where this port is 0."""
    homes = [pd.name for pd in deployment.of_kind("pd")]
    each = len(homes) > 1 and not together
    running = commands.with_nodes(deployment, hosts.engine_urls, hosts.kvds, hosts.relays)
    ports = gateway_ports(homes, deployment.gateway.port) if each else {}
    running = commands.with_gateways(running, ports)
    if each and running.gateway.member_key_file is None:
        # Gateways accept reports of one another under this key only.
        section = msgspec.structs.replace(
            running.gateway, member_key_file=str(_new_member_key(hosts.folder))
        )
        running = msgspec.structs.replace(running, gateway=section)
    file = hosts.folder / "deployment.toml"
    file.write_text(deployment_toml(running), encoding="utf-8")
    started = [
        commands.gateway_command(file, options, on_line, name=f"gateway-{home}", cluster=home)
        for home in (homes if each else ())
    ] or [commands.gateway_command(file, options, on_line)]
    say("the gateway" if len(started) == 1 else f"{len(started)} gateways")
    async with open_client() as http:
        for kvd in hosts.kvds.values():
            await _reset_role(http, kvd.http)
        children = [await hosts.children.start(command) for command in started]
        try:
            ready = [(await child.ready()).http for child in children]
            urls = ready if each else ready * len(homes)
            live = RunningDeployment(running, hosts, dict(zip(homes, urls, strict=True)), http)
            await _wait_until_all_in_use(live)
            yield live
        finally:
            await hosts.children.end(children)


def _new_member_key(folder: Path) -> Path:
    """Writes a key that only this user can read."""
    file = folder / "member.key"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{secrets.token_hex(32)}\n")
    return file


async def _reset_role(http: HttpClient, kvd_url: str) -> None:
    """A new gateway keeps the roles that it finds, and these may be another deployment's."""
    url = f"{kvd_url}/v1/role"
    role = await http.request_json("GET", url, dict[str, Any], timeout_s=REQUEST_S)
    body = msgspec.json.encode({**role, "role": "both"})
    await http.request("POST", url, timeout_s=REQUEST_S, body=body)


async def _wait_until_all_in_use(live: RunningDeployment) -> None:
    """Waits until every gateway uses every node."""
    nodes = len(list_hosts(live.deployment))
    dying = asyncio.create_task(live.hosts.children.until_one_dies())
    try:
        async with asyncio.timeout(READY_S):
            while any(_nodes_in_use(state) < nodes for state in (await live.states()).values()):
                done, _ = await asyncio.wait({dying}, timeout=POLL_S)
                if done:
                    raise dying.result()
    finally:
        dying.cancel()


def _nodes_in_use(state: Mapping[str, Any]) -> int:
    return sum(
        node["alive"] and node.get("in_use", False)
        for cluster in state["clusters"]
        for node in cluster["nodes"]
    )


def _port_for(engines: EngineSpec) -> int:
    """A free port for vLLM, which cannot announce a port that the kernel chose; 0 for others."""
    return _free_ports(1)[0] if engines.kind == "vllm" else 0


def gateway_ports(homes: Sequence[str], first: int) -> dict[str, int]:
    """Ports that are known before the gateways start: all of them read one file. `first` 0: free
    ones."""
    ports = _free_ports(len(homes)) if first == 0 else range(first, first + len(homes))
    return dict(zip(homes, ports, strict=True))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        # All are held at once, so that no two are the same.
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in held]
