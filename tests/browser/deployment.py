"""A live deployment with its console: two PD clusters share two PrfaaS clusters, on emulated
accelerators, with a relay for each link and one gateway with an operator key."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, load_deployment
from prfaas.config.write import deployment_toml
from prfaas.contracts.gateway_api import DRAIN_PATH
from prfaas.contracts.kvd_api import Heartbeat, KvdReport
from prfaas.engine.checkpoint.tokenizer import save_tokenizer
from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.generation import CLUSTER_HEADER
from prfaas.http_client.client import HttpClient, open_client
from prfaas.launch import commands
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import RunningHosts, launched_hosts
from prfaas.launch.preparation import LaunchOptions, LaunchPlan, prepare_launch
from prfaas.launch.request_outcomes import RequestOutcome, RequestOutcomes
from prfaas.launch.services.hosts import EngineSpec, list_hosts
from prfaas.measure.client import Target, connect
from prfaas.measure.open_loop import RequestTemplate
from prfaas.security.shared_key import SharedKey
from tests.benches import bench
from tests.secret_files import write_secret
from tests.waiting import HANG_S, PATIENCE_S

TWO_BY_TWO = Path(__file__).parents[2] / "configs" / "two_by_two.toml"
INSTANCES = {"east": 3, "west": 2, "north": 2, "south": 1}
HOMES = ("east", "west")
SCALES = Scales(time=0.5, bytes=1 / 256, output=1 / 32)
MAX_TOKENS = 131_072
LOOK_S = 0.05  # between two polls of the gateway's state
REQUEST_S = 60.0  # for one response; only a process that hangs takes longer
OFFLOADED_TOKENS = 40_000  # far above every threshold
# Of the traffic: most prompts are short, and some are offloaded.
PROMPT_TOKENS = (600, 900, 1_500, 3_000, 8_000, 24_000, 40_000)


class LiveDeployment:
    """Everything a test does to it, and the gateway's own view of it."""

    def __init__(
        self,
        hosts: RunningHosts,
        engines: EngineSpec,
        url: str,
        operator_key: str,
        operator: HttpClient,
        outcomes: RequestOutcomes,
    ) -> None:
        self.url = url
        self.operator_key = operator_key
        self.outcomes = outcomes
        self._hosts = hosts
        self._engines = engines
        self._operator = operator
        self._numbers = itertools.count()

    @property
    def model(self) -> str:
        return self._hosts.deployment.model.name

    @property
    def nodes(self) -> list[str]:
        return [host.name for host in list_hosts(self._hosts.deployment)]

    # What the gateway knows -----------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        return await self._operator.request_json(
            "GET", f"{self.url}/prfaas/v1/state", dict[str, Any], timeout_s=REQUEST_S
        )

    async def first_shown(self, shows: Callable[[dict[str, Any]], bool]) -> float:
        """The time since the epoch at which the gateway's state first showed it: not after that, as
        it is the time at which the request for this state was sent."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                asked_s = time.time()
                if shows(await self.state()):
                    return asked_s
                await asyncio.sleep(LOOK_S)

    # Faults ---------------------------------------------------------------------------------------

    async def order(self, source: str, target: str, order: str) -> None:
        """To the relay of a link: `outage`, `restore`."""
        self._hosts.children.named(f"wan-{source}-{target}").write_line(order)

    async def drain(self, cluster: str, *, drained: bool) -> None:
        body = msgspec.json.encode({"cluster": cluster, "drained": drained})
        await self._operator.request(
            "POST", f"{self.url}{DRAIN_PATH}", timeout_s=REQUEST_S, body=body
        )

    def freeze_gateway(self) -> None:
        """It keeps its connections, and answers nothing until it is thawed."""
        self._hosts.children.named("gateway").freeze()

    def thaw_gateway(self) -> None:
        self._hosts.children.named("gateway").thaw()

    async def kill(self, node: str) -> None:
        await self._hosts.children.named(node).kill()

    async def restart(self, node: str) -> None:
        """At its old address."""
        (host,) = [one for one in list_hosts(self._hosts.deployment) if one.name == node]
        port = urlsplit(self._hosts.engine_urls[node]).port
        assert port is not None
        kvd = self._hosts.kvds[node]
        command = commands.engine_command(host, self._hosts.folder, kvd, self._engines, port)
        child = await self._hosts.children.start(command)
        async with asyncio.timeout(PATIENCE_S):
            await child.ready()

    async def register(self, kvd_url: str, cluster: str) -> None:
        """As the kvd does it itself."""
        report = await self._operator.request_json(
            "GET", f"{kvd_url}/v1/stats", KvdReport, timeout_s=REQUEST_S
        )
        body = msgspec.json.encode(Heartbeat(kvd_url, cluster, report))
        url = f"{self.url}/prfaas/v1/register"
        await self._operator.request("POST", url, timeout_s=REQUEST_S, body=body)

    # Requests -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def client(self, home: str) -> AsyncIterator[Target]:
        headers = {CLUSTER_HEADER: home}
        async with connect(self.url, MonotonicClock(), headers=headers) as target:
            yield target

    async def ask(self, home: str, prompt_tokens: int) -> tuple[RequestOutcome, float]:
        """Sends a prompt that is not cached. What the gateway has logged about it, and when."""
        async with self.client(home) as target:
            answer = await target.complete(self._body(prompt_tokens), within_s=REQUEST_S)
        assert answer.error is None, answer.error
        async with asyncio.timeout(PATIENCE_S):
            outcome = await self.outcomes.of(answer.request_id)
        return outcome, time.time()

    def _body(
        self, prompt_tokens: int, output_tokens: int = 8, conversation: int | None = None
    ) -> bytes:
        """Prompts of one conversation begin alike; others share nothing."""
        number = next(self._numbers)
        salt = f"alone {number}" if conversation is None else f"conversation {conversation}"
        prompt = ",".join(str(n % 200) for n in range(prompt_tokens))
        return RequestTemplate(self.model, salt).body(prompt.encode(), output_tokens)

    @asynccontextmanager
    async def traffic(self, per_s: float) -> AsyncIterator[None]:
        """Sends prompts of all lengths to both PD clusters until it is left."""

        async def send() -> None:
            chosen = random.Random(7)
            async with (
                self.client(HOMES[0]) as east,
                self.client(HOMES[1]) as west,
                asyncio.TaskGroup() as group,
            ):
                while True:
                    target = chosen.choices((east, west), (2, 1))[0]
                    tokens, output_tokens = chosen.choice(PROMPT_TOKENS), chosen.randrange(8, 48)
                    # Every third prompt belongs to one of a few conversations.
                    conversation = chosen.choice((*range(6), *[None] * 12))
                    body = self._body(tokens, output_tokens, conversation)
                    group.create_task(target.complete(body, within_s=REQUEST_S))
                    await asyncio.sleep(chosen.expovariate(per_s))

        sending = asyncio.create_task(send())
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def links_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """As the console names them."""
    return {f"{link['from']} -> {link['to']}": link for link in state["links"]}


def nodes_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(node["node"]): node for cluster in state["clusters"] for node in cluster["nodes"]}


@asynccontextmanager
async def live_deployment(folder: Path) -> AsyncIterator[LiveDeployment]:
    plan, outcomes = _prepare(folder), RequestOutcomes()
    key = secrets.token_hex(16)
    key_file = folder / "operator.key"
    key_file.touch(0o600)
    write_secret(key_file, f"{key}\n")
    async with (
        launched_hosts(plan.deployment, plan.engines, folder, attached_prefix()) as hosts,
        open_client(SharedKey([key])) as operator,
    ):
        running = commands.with_nodes(plan.deployment, hosts.engine_urls, hosts.kvds, hosts.relays)
        section = msgspec.structs.replace(
            running.gateway,
            operator_key_file=str(key_file),
            insecure=True,  # a test registers a kvd that has no member key
        )
        file = folder / "deployment.toml"
        running = msgspec.structs.replace(running, gateway=section)
        file.write_text(deployment_toml(running), encoding="utf-8")
        command = commands.gateway_command(file, ["--console"], outcomes.read_line)
        gateway = await hosts.children.start(command)
        url = (await gateway.ready()).http
        live = LiveDeployment(hosts, plan.engines, url, key, operator, outcomes)
        await _wait_until_all_in_use(live)
        yield live


def _prepare(folder: Path) -> LaunchPlan:
    whole = load_deployment(TWO_BY_TWO)
    clusters = [
        msgspec.structs.replace(cluster, gpus=cluster.gpus_per_instance * INSTANCES[cluster.name])
        for cluster in whole.clusters
    ]
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    save_tokenizer(tokenizer, max_tokens=MAX_TOKENS)
    section = msgspec.structs.replace(whole.gateway, tokenizer=str(tokenizer))
    deployment: Deployment = msgspec.structs.replace(whole, clusters=clusters, gateway=section)
    return prepare_launch(deployment, TWO_BY_TWO, LaunchOptions("emulated", SCALES), folder)


async def _wait_until_all_in_use(live: LiveDeployment) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            nodes = nodes_of(await live.state())
            if all(name in nodes and nodes[name].get("in_use") for name in live.nodes):
                return
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def stand_in_kvd(name: str) -> AsyncIterator[str]:
    """A kvd that answers every poll, and whose node has this name. Yields its URL."""
    null_node: Any = bench("_null_node")
    hosts: list[Any] = []
    connections: list[asyncio.BaseTransport] = []

    class Connection(null_node.Http):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(hosts[0])

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connections.append(transport)
            super().connection_made(transport)

    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    hosts.append(null_node.Host(name, port))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()
        for connection in connections:
            connection.close()
