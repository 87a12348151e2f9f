"""A deployment of real processes with emulated engines, its clients, and a Prometheus."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from prfaas.config import Deployment, load_deployment
from prfaas.config.deployment import Node, ReplanSection
from prfaas.config.gateway import TenantSection
from prfaas.config.write import deployment_toml
from prfaas.contracts.readiness import GatewayReady
from prfaas.errors import PeerError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import Child
from prfaas.launch.commands import gateway_command
from prfaas_lab.faults.credentials import HOSTILE_TENANT, ORDINARY_TENANTS
from prfaas_lab.faults.deployment import FaultDeployment, launched_fault_deployment
from prfaas_lab.faults.preparation import prepare_fault_deployment
from prfaas_lab.faults.questions import prompt
from tests.deploy.prometheus import (
    ROOT,
    RULES,
    Prometheus,
    quick_rules,
    running_prometheus,
)

SCRAPE_S = 1.0
RANGE_S, FOR_S = 10, 1  # of the rules, instead of minutes
SHORT, LONG = 1_000, 100_000  # prompt tokens: the threshold is between them
_STREAMED_TOKENS = 20_000  # an answer that lasts longer than the test
PATIENCE_S = 90.0  # for one alert; only a hang takes so long
_NO_ONE = Node("http://127.0.0.1:9", "http://127.0.0.1:9")  # the port of `discard`: refused


class ObservedDeployment:
    def __init__(self, served: FaultDeployment, prometheus: Prometheus, targets: Path) -> None:
        self.served = served
        self.prometheus = prometheus
        self.gateways = dict(zip(served.gateways, (t.url for t in served.targets), strict=True))
        self.began = time.time()
        self.fired: dict[str, list[dict[str, Any]]] = {}  # every alert so far
        self._targets = targets
        self._numbers = count()
        self._model = served.deployment.model.name

    # Requests -------------------------------------------------------------------------------------

    async def ask(
        self,
        ids: Iterable[int],
        *,
        gateway: str = "gateway-0",
        tenant: str = ORDINARY_TENANTS[0],
        output_tokens: int = 4,
    ) -> int:
        """The status of a streamed completion that was read to its end, whatever that is; 0 when
        the connection broke."""
        body = {"model": self._model, "prompt": list(ids), "max_tokens": output_tokens}
        # Emulated engines have no text: without ids their events would be empty.
        more = {"stream": True, "ignore_eos": True, "return_token_ids": True}
        data = msgspec.json.encode({**body, **more})
        url = f"{self.gateways[gateway]}/v1/completions"
        try:
            async with self.served.access.tenants[tenant].post(url, data=data) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, TimeoutError):
            return 0

    def new_prompt(self, tokens: int) -> tuple[int, ...]:
        return prompt(tokens, f"observed {next(self._numbers)}")

    async def traffic(self) -> None:
        """Short and long requests of the ordinary tenants at both gateways, until cancelled."""
        for number in count():
            await asyncio.gather(
                *(
                    self.ask(
                        self.new_prompt(tokens),
                        gateway=f"gateway-{number % 2}",
                        tenant=ORDINARY_TENANTS[number % 3],
                    )
                    for tokens in (SHORT, SHORT, LONG // 4)
                )
            )

    # Alerts ---------------------------------------------------------------------------------------

    async def look(self) -> set[str]:
        """The alerts that fire now."""
        firing = await self.prometheus.firing()
        self.fired |= firing
        return set(firing)

    async def expect(self, *alerts: str, while_doing: Callable[[], Any] | None = None) -> None:
        """Waits until each of the alerts has fired. `while_doing`: a coroutine function, called
        again and again meanwhile; it makes the fault."""
        missing = set(alerts)
        doing = None if while_doing is None else asyncio.create_task(_repeat(while_doing))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while missing:
                    missing -= await self.look()
                    await asyncio.sleep(SCRAPE_S / 4)
        except TimeoutError:
            raise AssertionError(f"{sorted(missing)} did not fire") from None
        finally:
            if doing is not None:
                doing.cancel()
                with suppress(asyncio.CancelledError):
                    await doing

    # Processes ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def streams(self, nodes: Iterable[str]) -> AsyncIterator[None]:
        """Answers that do not end stream from each of these decode nodes, through the first
        gateway, until the block ends or they break. Other traffic has at most three requests."""
        await self.served.until(self.served.in_use)
        asked = [
            asyncio.create_task(self.ask(self.new_prompt(SHORT), output_tokens=_STREAMED_TOKENS))
            for _ in range(8)
        ]
        try:
            for node in nodes:
                instance = urlsplit(self.served.node(node).url).netloc
                await self.until(f'vllm:num_requests_running{{instance="{instance}"}} > 3')
            yield
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def until(self, query: str, series: int = 1) -> None:
        """Waits until the query returns so many series."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if len(await self.prometheus.query(query)) >= series:
                    return
                await asyncio.sleep(SCRAPE_S / 4)

    async def pages(self) -> dict[str, str]:
        """What each process exposes."""
        served = self.served
        urls = {**self.gateways, **{f"kvd-{n}": served.kvd_url(n) for n in served.names}}
        urls |= {name: served.node(name).url for name in served.names}
        return {name: await served.text(f"{url}/metrics") for name, url in urls.items()}

    async def add_gateway(
        self, name: str, change: Callable[[Deployment], Deployment] = lambda given: given
    ) -> None:
        """Starts one more gateway that makes plans, with a changed deployment file."""
        folder = self.served.hosts.folder
        file = folder / f"{name}.toml"
        given = load_deployment(folder / "gateway-0.toml")
        file.write_text(deployment_toml(change(given)))
        command = gateway_command(file, ("--port", "0"), name=name)
        child: Child[GatewayReady] = await self.served.hosts.children.start(command)
        self.gateways[name] = (await child.ready()).http
        self.write_targets()

    async def remove_gateway(self, name: str) -> None:
        """Kills it. Prometheus still looks for it until `write_targets`."""
        await self.served.hosts.children.named(name).kill()
        del self.gateways[name]

    def write_targets(self) -> None:
        served = self.served
        jobs = {
            "prfaas-gateway": list(self.gateways.values()),
            "prfaas-kvd": [served.kvd_url(name) for name in served.names],
            "prfaas-node": [served.node(name).url for name in served.names],
        }
        found = [
            {
                "targets": [urlsplit(url).netloc for url in urls],
                "labels": {"job": job, "deployment": "test"},
            }
            for job, urls in jobs.items()
        ]
        replacing = self._targets.with_suffix(".new")
        replacing.write_text(json.dumps(found))
        replacing.rename(self._targets)


def unreachable(given: Deployment) -> Deployment:
    """No process is at the addresses of the nodes."""
    clusters = [msgspec.structs.replace(cluster, nodes=[_NO_ONE]) for cluster in given.clusters]
    return msgspec.structs.replace(given, clusters=clusters)


def eager(given: Deployment) -> Deployment:
    """Its gateway wants a second local prefill node as soon as it has seen some traffic, and makes
    one attempt for each request."""
    far, near = given.clusters
    rules = ReplanSection(every_s=1.0, warmup_s=0.0, block_requests=20, dwell_s=0.0)
    return msgspec.structs.replace(
        given,
        clusters=[far, msgspec.structs.replace(near, prefill=2, decode=1)],
        scheduler=msgspec.structs.replace(given.scheduler, replan=rules),
        gateway=msgspec.structs.replace(given.gateway, max_attempts=1),
    )


async def _repeat(doing: Callable[[], Any]) -> None:
    while True:
        try:
            await doing()
        except PeerError:  # a process does not answer at the moment: the fault lasts
            await asyncio.sleep(SCRAPE_S / 4)


@asynccontextmanager
async def observed_deployment(folder: Path) -> AsyncIterator[ObservedDeployment]:
    case = ROOT / "configs" / "case_study.toml"
    ready, _ = await prepare_fault_deployment("emulated", case, folder, folder / "cache", print)
    tenants = {HOSTILE_TENANT: TenantSection(max_in_flight=1)}
    section = msgspec.structs.replace(ready.deployment.gateway, tenants=tenants)
    deployment = msgspec.structs.replace(ready.deployment, gateway=section)
    rules, targets = folder / "rules.yaml", folder / "targets.json"
    rules.write_text(quick_rules(RULES.read_text(), RANGE_S, FOR_S))
    targets.write_text("[]")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "evaluation_interval": f"{SCRAPE_S:g}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "prfaas",
                "authorization": {"credentials_file": str(folder / "keys" / "metrics.key")},
                "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
            }
        ],
    }
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            launched_fault_deployment(deployment, ready.engines, folder, attached_prefix(), print)
        )
        prometheus = await stack.enter_async_context(running_prometheus(folder, config))
        observed = ObservedDeployment(served, prometheus, targets)
        observed.write_targets()
        yield observed
