"""A deployment as it runs on this machine: kvds, engines, relays, a gateway, brought up in order.

Leaving ends all of them. Knows nothing of what is served, or of how it is shown.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from prfaas.config import Deployment
from prfaas.config.write import deployment_toml
from prfaas.errors import PeerError
from prfaas.launch import commands
from prfaas.launch.children import Child, Children
from prfaas.launch.commands import Engines

READY_S = 300.0  # for the gateway to see every node; engines have started by then
LOOK_S = 0.2  # between two looks at it
ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Live:
    """A deployment that takes requests."""

    deployment: Deployment
    file: Path
    folder: Path
    gateway_url: str
    engine_urls: dict[str, str]
    kvd_urls: dict[str, str]
    children: Children
    http: aiohttp.ClientSession

    async def state(self) -> dict[str, Any]:
        return await self.ask(f"{self.gateway_url}/prfaas/v1/state")

    async def ask(self, url: str) -> dict[str, Any]:
        try:
            async with self.http.get(url) as answer:
                found: dict[str, Any] = msgspec.json.decode(await answer.read())
                return found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise PeerError(f"{url}: no answer: {error}") from None
        except msgspec.MsgspecError as error:
            raise PeerError(f"{url}: not JSON: {error}") from None

    def relays(self) -> list[Child]:
        """Of the links between clusters; they obey `prfaas wan --control`."""
        return [self.children.named(way.name) for way in commands.ways(self.deployment)]


@asynccontextmanager
async def launched(
    deployment: Deployment,
    engines: Engines,
    folder: Path,
    tether: Sequence[str],
    *,
    gateway_options: Sequence[str] = (),
    heard: Callable[[str], None] | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[Live]:
    """`say` is told what is being waited for, `heard` every line of the gateway's. Raises
    `ChildDied`."""
    everybody = commands.hosts(deployment)
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    async with (
        Children(folder, tether) as children,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        say(f"{len(everybody)} kvds")
        said = await children.started(
            [commands.kvd(host, folder, engines.memory) for host in everybody]
        )
        kvds = {host.name: commands.parse_kvd(said[f"kvd-{host.name}"]) for host in everybody}
        say(f"{len(everybody)} engines")
        ports = [_free_port() if engines.kind == "vllm" else 0 for _ in everybody]
        urls = await children.started(
            [
                commands.engine(host, folder, kvds[host.name], engines, port)
                for host, port in zip(everybody, ports, strict=True)
            ]
        )
        if engines.kind == "vllm":
            urls = {
                host.name: f"http://127.0.0.1:{port}"
                for host, port in zip(everybody, ports, strict=True)
            }
        say("the links between clusters")
        ways = commands.ways(deployment)
        said = await children.started([commands.relay(way, kvds) for way in ways])
        relays: dict[str, str] = {}
        for way in ways:
            relays |= commands.parse_relay(said[way.name], way)
        running = commands.with_nodes(deployment, urls, kvds, relays)
        file = folder / "deployment.toml"
        file.write_text(deployment_toml(running), encoding="utf-8")
        say("the gateway")
        where = await children.started([commands.gateway(file, gateway_options, heard)])
        live = Live(
            running,
            file,
            folder,
            where["gateway"],
            urls,
            {name: kvd.url for name, kvd in kvds.items()},
            children,
            http,
        )
        await _all_seen(live, len(everybody))
        yield live


async def _all_seen(live: Live, nodes: int) -> None:
    """Until the gateway has heard of every node and knows its role."""
    dying = asyncio.create_task(live.children.until_one_dies())
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
