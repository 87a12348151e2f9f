"""`bench lost_clusters`: the live deployment of two by two, and what can be done to its processes.

A killed process is started again at its old address, as a service manager would do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from _agree_regions import MEMORY
from _lost_requests import GatewayLines, Load, Loss
from _lost_watch import Watch, beside
from prfaas.clock import Clock, MonotonicClock
from prfaas.contracts.gateway_api import DRAIN_PATH, SetDrain
from prfaas.demo.shared import run_watched
from prfaas.launch import commands
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import Command
from prfaas.launch.deployment import RunningDeployment, launched_gateway, launched_hosts
from prfaas.launch.services.hosts import EngineSpec, Host, list_hosts
from prfaas.measure.client import Target, connect
from prfaas_lab.studies.regions_case import RegionsCase

START_S = 180.0  # for processes to start on a busy machine
POLL_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """The running deployment, and all that the benchmark has of it."""

    case: RegionsCase
    live: RunningDeployment
    engines: EngineSpec
    targets: Mapping[str, Target]
    lines: GatewayLines
    watch: Watch
    clock: Clock
    watching: asyncio.Task[None]  # runs `watch`

    @property
    def homes(self) -> list[str]:
        return self.case.homes

    @property
    def hosts(self) -> list[Host]:
        return list_hosts(self.case.deployment)

    @property
    def cluster_of(self) -> dict[str, str]:
        return {host.name: host.cluster for host in self.hosts}

    @property
    def instances(self) -> dict[str, int]:
        return {cluster.name: cluster.instances for cluster in self.case.deployment.clusters}

    def load(self, seed: int) -> Load:
        workloads = {home.cluster: home.problem.workload for home in self.case.problem.homes}
        return Load(self.targets, workloads, self.case.deployment.model.name, self.clock, seed)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the work's result. Raises when a process exits that was not killed here, or when
        the watch of the gateways fails."""
        return await run_watched(self.live.hosts.children, beside(self.watching, work))

    # Processes ------------------------------------------------------------------------------------

    async def kill_nodes(self, cluster: str) -> Loss:
        """Kills every kvd and engine of a cluster, at once. The loss has no end yet."""
        hosts = [host for host in self.hosts if host.cluster == cluster]
        names = [name for host in hosts for name in (host.name, f"kvd-{host.name}")]
        at_s = self.clock.now()
        await self._kill(names)
        return Loss(cluster, "nodes", at_s, float("inf"))

    async def start_nodes(self, cluster: str) -> None:
        """Returns when all of them have announced that they are ready."""
        hosts = [host for host in self.hosts if host.cluster == cluster]
        at = self.live.hosts.kvds
        folder = self.live.hosts.folder
        kvds: list[Command[Any]] = [
            commands.kvd_command(host, folder, self.engines, at[host.name]) for host in hosts
        ]
        engines: list[Command[Any]] = [
            commands.engine_command(
                host, folder, at[host.name], self.engines, _port(self.live, host)
            )
            for host in hosts
        ]
        async with asyncio.timeout(START_S):
            await self.live.hosts.children.start_all(kvds)
            await self.live.hosts.children.start_all(engines)

    async def kill_gateway(self, home: str) -> Loss:
        at_s = self.clock.now()
        await self._kill([f"gateway-{home}"])
        return Loss(home, "gateway", at_s, float("inf"))

    async def start_gateway(self, home: str) -> None:
        """Returns when a load balancer would send requests to it."""
        command = commands.gateway_command(
            self.live.hosts.folder / "deployment.toml",
            (),
            self.lines.read_line,
            name=f"gateway-{home}",
            cluster=home,
        )
        async with asyncio.timeout(START_S):
            await self.live.hosts.children.start_all([command])
            while True:
                if await self.watch.is_ready(home):
                    return
                await asyncio.sleep(POLL_S)

    async def _kill(self, names: list[str]) -> None:
        children = self.live.hosts.children
        await asyncio.gather(*(children.named(name).kill() for name in names))

    async def order_drain(self, cluster: str, *, drained: bool) -> None:
        url = f"{self.live.gateway_urls[self.homes[0]]}{DRAIN_PATH}"
        body = msgspec.json.encode(SetDrain(cluster, drained))
        await self.live.http.request("POST", url, timeout_s=10.0, body=body)

    async def until(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Waits for a condition. Whether it came within this time."""
        until_s = self.clock.now() + within_s
        while not condition():
            if self.clock.now() >= until_s:
                return False
            await asyncio.sleep(POLL_S)
        return True


def _port(live: RunningDeployment, host: Host) -> int:
    port = urlsplit(live.hosts.engine_urls[host.name]).port
    assert port is not None
    return port


@asynccontextmanager
async def running_world(case: RegionsCase, folder: Path) -> AsyncIterator[World]:
    """Starts the hosts and a gateway for each PD cluster. Raises `ChildDied`."""
    clock, lines = MonotonicClock(), GatewayLines()
    engines = replace(case.engines, memory=MEMORY)
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(
            launched_hosts(case.deployment, engines, folder, attached_prefix())
        )
        live = await stack.enter_async_context(
            launched_gateway(hosts, case.deployment, on_line=lines.read_line)
        )
        targets = {
            home: await stack.enter_async_context(connect(url, clock))
            for home, url in live.gateway_urls.items()
        }
        watch = Watch(live.gateway_urls, live.http, clock)
        watching = asyncio.create_task(watch.run())
        stack.push_async_callback(_cancelled, watching)
        yield World(case, live, engines, targets, lines, watch, clock, watching)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
