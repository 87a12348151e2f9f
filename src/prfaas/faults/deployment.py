"""A deployment of real processes to which things happen: two gateways over hosts with a WAN between
their clusters, any of which can be killed, frozen, and started again where it was.

Starting again is what a service manager does; everything else a deployment must find by itself.
Knows nothing of which faults there are, or of what clients ask.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment
from prfaas.config.write import deployment_toml
from prfaas.errors import PeerError, PeerHttpError
from prfaas.faults.wall_clock import WallClock
from prfaas.http_client.client import HttpClient, open_client
from prfaas.launch import commands
from prfaas.launch.children import Child, Command
from prfaas.launch.commands import Engines, Host
from prfaas.launch.deployment import Hosts, launched_hosts
from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.measure.client import CONNECT_S, Target

GATEWAYS = ("gateway-0", "gateway-1")  # the first one plans
LOOK_S = 0.05  # between two looks at what has no event
PATIENCE_S = 120.0  # for what must happen; engines that import torch on a busy machine take long
ASK_S = 10.0
# No idle connection is left at a process: the sockets that each process holds are counted.
_ONE_REQUEST = {"Connection": "close"}
REQUEST_S = 180.0  # longer than a gateway lets one wait, with the answer behind it


class FaultDeployment:
    def __init__(
        self,
        hosts: Hosts,
        commands_of: dict[str, Command],
        urls: Sequence[str],
        http: HttpClient,
        load_session: aiohttp.ClientSession,
        stories: RequestOutcomes,
        wall_clock: WallClock,
    ) -> None:
        self.wall_clock = wall_clock
        self.deployment = hosts.deployment
        self.stories = stories
        self.load_session = load_session
        self.clock = MonotonicClock()
        model = hosts.deployment.model.name
        self.targets = [Target(load_session, url, self.clock, model) for url in urls]
        self.killed: Counter[str] = Counter()
        self._http = http
        self._hosts = hosts
        self._commands = commands_of
        self._children = hosts.children
        (self._wan,) = (way.name for way in commands.ways(hosts.deployment))
        self.gbps = commands.ways(hosts.deployment)[0].link.gbps

    # Who is there ---------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return [host.name for host in commands.hosts(self.deployment)]

    @property
    def far(self) -> str:
        return next(h.name for h in commands.hosts(self.deployment) if h.cluster != self._local)

    @property
    def _local(self) -> str:
        return self.deployment.of_kind("pd")[0].name

    def child(self, name: str) -> Child:
        return self._children.named(name)

    @property
    def processes(self) -> dict[str, int]:
        """Of everything that runs: its process id."""
        return {child.name: child.process.pid for child in self._children}

    def node(self, name: str) -> Target:
        """Its engine, asked directly."""
        url = self._hosts.engine_urls[name]
        return Target(self.load_session, url, self.clock, self.deployment.model.name)

    # What they say --------------------------------------------------------------------------------

    async def get(self, url: str) -> Any:
        """JSON. Raises `PeerError`."""
        return msgspec.json.decode(await self._call("GET", url))

    async def post(self, url: str, body: Any) -> Any:
        return msgspec.json.decode(await self._call("POST", url, msgspec.json.encode(body)))

    async def text(self, url: str) -> str:
        return (await self._call("GET", url)).decode()

    async def _call(self, method: str, url: str, body: bytes = b"") -> bytes:
        try:
            return await self._http.request(
                method, url, timeout_s=ASK_S, body=body, headers=_ONE_REQUEST
            )
        except PeerHttpError as error:
            raise PeerError(f"{url}: HTTP {error.status}: {error}") from None

    def kvd_url(self, name: str) -> str:
        return self._hosts.kvds[name].url

    async def stats(self, name: str, *, check: bool = False) -> Any:
        """A kvd's report; with `check` it has verified its pool's invariants."""
        return await self.get(f"{self.kvd_url(name)}/v1/stats{'?check=1' if check else ''}")

    async def state(self, gateway: int = 0) -> Any:
        return await self.get(f"{self.targets[gateway].url}/prfaas/v1/state")

    async def with_role(self, role: str) -> list[str]:
        """Nodes at home."""
        clusters = (await self.state())["clusters"]
        (home,) = (c for c in clusters if c["cluster"] == self._local)
        return [node["node"] for node in home["nodes"] if node.get("role") == role]

    # What happens to them -------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        self.killed[name] += 1
        await self.child(name).kill()

    async def restart(self, name: str) -> None:
        """Where it was before. Returns when it is ready."""
        child = await self._children.start(self._commands[name])
        async with asyncio.timeout(PATIENCE_S):
            await child.ready()

    def wan(self, order: str) -> None:
        """A line that `prfaas wan --control` understands."""
        self.child(self._wan).tell(order)

    async def until(self, condition: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
        """`condition` is a coroutine function; who does not answer has not fulfilled it."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    if await condition():
                        return
                except PeerError:
                    pass
                await asyncio.sleep(LOOK_S)

    async def all_in_use(self) -> bool:
        return await self.in_use(self.names)

    async def in_use(self, names: Collection[str]) -> bool:
        """Whether every gateway is there and counts on these nodes."""
        return all([set(names) <= await self.used_by(n) for n in range(len(self.targets))])

    async def used_by(self, gateway: int) -> set[str]:
        """The nodes it counts on."""
        clusters = (await self.state(gateway))["clusters"]
        nodes = [node for cluster in clusters for node in cluster["nodes"]]
        return {node["node"] for node in nodes if node.get("in_use")}


@asynccontextmanager
async def staged(
    deployment: Deployment,
    engines: Engines,
    folder: Path,
    tether: Sequence[str],
    say: Callable[[str], None],
) -> AsyncIterator[FaultDeployment]:
    """Everything started and in use. Raises `ChildDied`."""
    stories = RequestOutcomes()
    wall_clock = WallClock(folder / "wall")
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, connect=CONNECT_S)
    async with (
        launched_hosts(
            deployment, engines, folder, tether, say=say, environment=wall_clock.environment
        ) as hosts,
        open_client() as http,
        aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as load_session,
    ):
        running = commands.with_nodes(deployment, hosts.engine_urls, hosts.kvds, hosts.relays)
        again: dict[str, Command] = {}
        for host in commands.hosts(deployment):
            again |= _again(host, hosts, engines)
        say("two gateways")

        def gateway(name: str, port: int) -> Command:
            options = ["--port", str(port)]
            return commands.gateway(folder / f"{name}.toml", options, stories.heard, name=name)

        for name in GATEWAYS:
            section = msgspec.structs.replace(running.gateway, plans=name == GATEWAYS[0])
            made = msgspec.structs.replace(running, gateway=section)
            (folder / f"{name}.toml").write_text(deployment_toml(made), encoding="utf-8")
        urls = await hosts.children.started([gateway(name, 0) for name in GATEWAYS])
        for name, url in urls.items():
            again[name] = gateway(name, urlsplit(url).port or 0)
        stage = FaultDeployment(
            hosts, again, list(urls.values()), http, load_session, stories, wall_clock
        )
        await stage.until(stage.all_in_use)
        yield stage


def _again(host: Host, hosts: Hosts, engines: Engines) -> dict[str, Command]:
    at = hosts.kvds[host.name]
    port = urlsplit(hosts.engine_urls[host.name]).port
    assert port is not None
    return {
        f"kvd-{host.name}": commands.kvd(host, hosts.folder, engines, at),
        host.name: commands.engine(host, hosts.folder, at, engines, port),
    }
