"""A deployment of real processes for fault injection: gateways, hosts in clusters, a WAN.

With one PD cluster it has two gateways, of which the first makes plans. With several it has one for
each, and they elect the one that plans (`clusters/gateways.py`).

It has the keys of a real deployment: of tenants, of the operator and of the members. Every process
can be killed, frozen, and restarted at its old address. The restart stands for a service manager;
the deployment must recover from everything else without help. This module does not know the
catalogue of faults or the requests of the clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment
from prfaas.errors import PeerError, PeerHttpError
from prfaas.http_client.client import HttpClient, open_client
from prfaas.launch import commands
from prfaas.launch.children import Child, Command
from prfaas.launch.deployment import RunningHosts, launched_hosts
from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.launch.services.hosts import EngineSpec, Host, list_hosts
from prfaas.measure.client import CONNECT_S, Target
from prfaas.security.shared_key import SharedKey, bearer
from prfaas_lab.faults.clusters.gateways import RunningGateways, start_gateways
from prfaas_lab.faults.clusters.layout import Layout
from prfaas_lab.faults.clusters.links import Links
from prfaas_lab.faults.credentials import ORDINARY_TENANTS, Credentials
from prfaas_lab.faults.downtimes import Downtimes
from prfaas_lab.faults.wall_clock import WallClock
from prfaas_lab.faults.worker_processes import name_workers

LOOK_S = 0.05  # between two polls
PATIENCE_S = 120.0  # limit of every wait; engines import torch slowly on a busy machine
ASK_S = 10.0  # timeout of a request to a kvd, a node or a gateway's state
# The sockets of every process are counted, so these requests leave no idle connection.
_ONE_REQUEST = {"Connection": "close"}
REQUEST_S = 180.0  # longer than a gateway's queueing limit and the answer together


@dataclass(frozen=True, slots=True)
class Access:
    """HTTP clients of a deployment, each with its own key."""

    credentials: Credentials
    operator: HttpClient
    member: HttpClient
    nodes: aiohttp.ClientSession  # with the member key
    tenants: Mapping[str, aiohttp.ClientSession]


class FaultDeployment:
    """Running processes by name, their state, and the means to kill and restart them."""

    def __init__(
        self,
        hosts: RunningHosts,
        commands_of: dict[str, Command[Any]],
        gateways: RunningGateways,
        access: Access,
        outcomes: RequestOutcomes,
        wall_clock: WallClock,
    ) -> None:
        self.wall_clock = wall_clock
        self.deployment = hosts.deployment
        self.outcomes = outcomes
        self.access = access
        self.clock = MonotonicClock()
        model = hosts.deployment.model.name
        self.gateways = list(gateways.urls)  # names of the processes
        self.targets_of = {
            tenant: [Target(session, url, self.clock, model) for url in gateways.urls.values()]
            for tenant, session in access.tenants.items()
        }
        self.targets = self.targets_of[ORDINARY_TENANTS[0]]
        self.downtimes = Downtimes()
        self.layout = Layout(hosts.deployment)
        self.hosts = hosts
        self._commands = {**commands_of, **gateways.commands}
        self._children = hosts.children
        from_prfaas = [
            way
            for way in commands.relayed_links(hosts.deployment)
            if way.link.source not in self.layout.homes
        ]
        self.links = Links(hosts.children, from_prfaas, gateways.relay)

    # Processes ------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the nodes."""
        return [host.name for host in list_hosts(self.deployment)]

    def child(self, name: str) -> Child[Any]:
        return self._children.named(name)

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of all running processes; those of kvds have their workers beside them."""
        found = {child.name: child.process.pid for child in self._children}
        return found | name_workers(found)

    def node(self, name: str) -> Target:
        """The engine of a node, for requests without a gateway."""
        url = self.hosts.engine_urls[name]
        return Target(self.access.nodes, url, self.clock, self.deployment.model.name)

    # State ----------------------------------------------------------------------------------------

    async def get(self, url: str) -> Any:
        """The JSON at `url`. Raises `PeerError`."""
        return msgspec.json.decode(await self._call("GET", url))

    async def post(self, url: str, body: Any) -> Any:
        return msgspec.json.decode(await self._call("POST", url, msgspec.json.encode(body)))

    async def text(self, url: str) -> str:
        return (await self._call("GET", url)).decode()

    async def _call(self, method: str, url: str, body: bytes = b"") -> bytes:
        at_gateway = any(url.startswith(f"{one.url}/") for one in self.targets)
        http = self.access.operator if at_gateway else self.access.member
        try:
            return await http.request(method, url, timeout_s=ASK_S, body=body, headers=_ONE_REQUEST)
        except PeerHttpError as error:
            raise PeerError(f"{url}: HTTP {error.status}: {error}") from None

    def kvd_url(self, name: str) -> str:
        return self.hosts.kvds[name].http

    async def stats(self, name: str, *, check: bool = False) -> Any:
        """A kvd's report. With `check` the kvd verifies its pool's invariants first."""
        return await self.get(f"{self.kvd_url(name)}/v1/stats{'?check=1' if check else ''}")

    async def state(self, gateway: int = 0) -> Any:
        return await self.get(f"{self.targets[gateway].url}/prfaas/v1/state")

    async def with_role(self, role: str) -> list[str]:
        """Nodes of the PD clusters that have this role, according to the first gateway that
        responds. Raises `PeerError`."""
        clusters = (await _first_state(self))["clusters"]
        homes = [cluster for cluster in clusters if cluster["cluster"] in self.layout.homes]
        nodes = [node for home in homes for node in home["nodes"]]
        return [node["node"] for node in nodes if node.get("role") == role]

    # Actions --------------------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        self.downtimes.begin(name, self.clock.now())
        await self.child(name).kill()

    async def restart(self, name: str) -> None:
        """Starts a process at its old address. Returns when it is ready."""
        child = await self._children.start(self._commands[name])
        async with asyncio.timeout(PATIENCE_S):
            await child.ready()
        if name in self.gateways:
            await self.until(partial(_can_serve, self, self.gateways.index(name)))
        self.downtimes.end(name, self.clock.now())

    def freeze(self, name: str) -> None:
        self.downtimes.begin(name, self.clock.now())
        self.child(name).freeze()

    def thaw(self, name: str) -> None:
        self.child(name).thaw()
        self.downtimes.end(name, self.clock.now())

    async def until(self, condition: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
        """Polls `condition`, a coroutine function. A `PeerError` counts as not fulfilled. Raises
        `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    if await condition():
                        return
                except PeerError:
                    pass
                await asyncio.sleep(LOOK_S)

    async def in_use(self, names: Collection[str] | None = None) -> bool:
        """Whether every gateway responds and has these nodes in use, all nodes by default; and of
        gateways that elect the one that plans, whether exactly one plans."""
        wanted = set(self.names if names is None else names)
        if not all([wanted <= await self.used_by(n) for n in range(len(self.targets))]):
            return False
        return len(self.layout.homes) == 1 or len(await planning_gateways(self)) == 1

    async def used_by(self, gateway: int) -> set[str]:
        """Nodes that the gateway has in use."""
        clusters = (await self.state(gateway))["clusters"]
        nodes = [node for cluster in clusters for node in cluster["nodes"]]
        return {node["node"] for node in nodes if node.get("in_use")}


async def _first_state(deployment: FaultDeployment) -> Any:
    """The state of the first gateway that responds. Raises `PeerError`."""
    *first, last = range(len(deployment.gateways))
    for gateway in first:
        with suppress(PeerError):  # it was killed; the next one knows as much
            return await deployment.state(gateway)
    return await deployment.state(last)


async def _can_serve(deployment: FaultDeployment, gateway: int) -> bool:
    """Raises `PeerError` while the gateway says that it cannot."""
    await deployment.text(f"{deployment.targets[gateway].url}/ready")
    return True


async def planning_gateways(deployment: FaultDeployment) -> list[str]:
    """Names of the gateways that plan, where these are elected. Raises `PeerError` when a gateway
    does not respond."""
    states = [await deployment.state(number) for number in range(len(deployment.gateways))]
    return [
        name
        for name, state in zip(deployment.gateways, states, strict=True)
        if state["planner"]["here"]
    ]


@asynccontextmanager
async def launched_fault_deployment(
    deployment: Deployment,
    engines: EngineSpec,
    folder: Path,
    prefix: Sequence[str],
    say: Callable[[str], None],
) -> AsyncIterator[FaultDeployment]:
    """Starts all processes, and waits until the gateways have all nodes in use. Raises
    `ChildDied`."""
    outcomes = RequestOutcomes()
    wall_clock = WallClock(folder / "wall")
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    credentials = Credentials.create(keys)
    deployment = credentials.with_keys(deployment)
    engines = replace(engines, options=[*engines.options, *credentials.member_options])
    async with (
        launched_hosts(
            deployment, engines, folder, prefix, say=say, environment=wall_clock.environment
        ) as hosts,
        _opened_access(credentials) as access,
    ):
        running = commands.with_nodes(deployment, hosts.engine_urls, hosts.kvds, hosts.relays)
        restarts: dict[str, Command[Any]] = {}
        for host in list_hosts(deployment):
            restarts |= _restart_commands(host, hosts, engines)
        on_line = partial(_read_line, outcomes)
        gateways = await start_gateways(running, hosts.children, folder, on_line, say)
        served = FaultDeployment(hosts, restarts, gateways, access, outcomes, wall_clock)
        await served.until(served.in_use)
        yield served


def _read_line(outcomes: RequestOutcomes, line: str) -> None:
    """Ignores requests whose client gave no id. Clients of this package give one; a hostile tenant
    sends so many requests that its lines would displace those of others."""
    if '{"id":"req-' not in line:
        outcomes.read_line(line)


@asynccontextmanager
async def _opened_access(credentials: Credentials) -> AsyncIterator[Access]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, connect=CONNECT_S)
    async with AsyncExitStack() as stack:

        async def session(key: str) -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            return await stack.enter_async_context(
                aiohttp.ClientSession(timeout=timeout, connector=connector, headers=bearer(key))
            )

        async def client(key: str) -> HttpClient:
            return await stack.enter_async_context(open_client(SharedKey([key])))

        yield Access(
            credentials,
            await client(credentials.operator),
            await client(credentials.member),
            await session(credentials.member),
            {name: await session(key) for name, key in credentials.tenants.items()},
        )


def _restart_commands(
    host: Host, hosts: RunningHosts, engines: EngineSpec
) -> dict[str, Command[Any]]:
    at = hosts.kvds[host.name]
    port = urlsplit(hosts.engine_urls[host.name]).port
    assert port is not None
    return {
        f"kvd-{host.name}": commands.kvd_command(host, hosts.folder, engines, at),
        host.name: commands.engine_command(host, hosts.folder, at, engines, port),
    }
