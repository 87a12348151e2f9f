"""A deployment of real processes whose requests are made slow on purpose.

    client ──► gateway ──► far-0 (prefill)  ── relay ──►  near (one prefills, one decodes)

The engines are emulated, with the paper's times on a small scale. The hosts serve all tests; each
test has a gateway of its own, so that no gateway knows what another one has seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, load_deployment
from prfaas.contracts.gateway_api import DRAIN_PATH
from prfaas.contracts.trace_api import REQUESTS_PATH, FollowedRequest
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import Child
from prfaas.launch.deployment import (
    RunningDeployment,
    RunningHosts,
    launched_gateway,
    launched_hosts,
)
from prfaas.launch.preparation import LaunchOptions, LaunchPlan, prepare_launch
from prfaas.measure.client import Target, TimedResponse, connect
from prfaas.measure.open_loop import RequestTemplate
from prfaas.measure.prompts import PromptGenerator, PromptPart
from tests.waiting import HANG_S, PATIENCE_S

CASE_STUDY = Path(__file__).parents[3] / "configs" / "case_study.toml"
FAR, NEAR = "prfaas", "pd"
TIME, BYTES, OUTPUT = 0.25, 0.002, 0.25
SLOTS = 20  # sequences that a node near decodes together, as its profile has them
LONG = 24 * 1024  # tokens: far-0 prefills them in about half a second
OUTPUT_TOKENS = 2
LOOK_S = 0.05  # between two looks


def planned(folder: Path, time: float = TIME) -> LaunchPlan:
    """`time`: of the engines, or as a gateway believes that the engines take it."""
    folder.mkdir(exist_ok=True)
    whole = load_deployment(CASE_STUDY)
    sizes = {FAR: {"gpus": 8}, NEAR: {"gpus": 16, "prefill": 1, "decode": 1}}
    clusters = [msgspec.structs.replace(one, **sizes[one.name]) for one in whole.clusters]
    rules = msgspec.structs.replace(whole.scheduler, policy="remote")
    small = msgspec.structs.replace(whole, clusters=clusters, scheduler=rules)
    options = LaunchOptions("emulated", Scales(time, BYTES, OUTPUT))
    plan = prepare_launch(small, CASE_STUDY, options, folder)
    # A pool keeps the state at a prompt's end only, and none at intervals before it.
    states = ("--set", "kvd.checkpoints=last")
    return replace(plan, engines=replace(plan.engines, options=states))


@asynccontextmanager
async def slow_hosts(folder: Path) -> AsyncIterator[SlowHosts]:
    plan = planned(folder)
    async with launched_hosts(plan.deployment, plan.engines, folder, attached_prefix()) as hosts:
        yield SlowHosts(hosts, plan.deployment)


@dataclass(frozen=True, slots=True)
class SlowHosts:
    hosts: RunningHosts
    deployment: Deployment

    @asynccontextmanager
    async def gateway(
        self, deployment: Deployment | None = None, options: Sequence[str] = ()
    ) -> AsyncIterator[SlowDeployment]:
        made = deployment or self.deployment
        async with (
            launched_gateway(self.hosts, made, options) as live,
            connect(live.gateway_url, MonotonicClock()) as target,
        ):
            slow = SlowDeployment(live, target)
            # A long body starts the processes that tokenise.
            await slow.explain(slow.body(("warm-up", LONG)))
            yield slow


class SlowDeployment:
    """A gateway with its hosts, a client, and what `prfaas trace` says."""

    def __init__(self, live: RunningDeployment, target: Target) -> None:
        self.live = live
        self.target = target
        self.model = live.deployment.model.name
        self._prompts = PromptGenerator()

    # Requests -------------------------------------------------------------------------------------

    def body(
        self, *parts: tuple[str, int], output_tokens: int = OUTPUT_TOKENS, choices: int = 1
    ) -> bytes:
        """A prompt of parts: a name, which fixes the tokens, and how many of them."""
        text = self._prompts.text([PromptPart(name.encode(), tokens) for name, tokens in parts])
        body = json.loads(RequestTemplate(self.model).body(text, output_tokens))
        return json.dumps({**body, "n": choices, "temperature": float(choices > 1)}).encode()

    async def ask(self, body: bytes, at: Target | None = None) -> TimedResponse:
        answer = await (at or self.target).complete(body, HANG_S)
        assert answer.error is None, answer.error
        return answer

    async def explain(self, body: bytes) -> Any:
        """Where the request would go now."""
        url = f"{self.live.gateway_url}/prfaas/v1/explain"
        http = self.live.http
        return json.loads(await http.request("POST", url, timeout_s=PATIENCE_S, body=body))

    async def drain(self, cluster: str, *, drained: bool) -> None:
        url = f"{self.live.gateway_url}{DRAIN_PATH}"
        body = json.dumps({"cluster": cluster, "drained": drained}).encode()
        await self.live.http.request("POST", url, timeout_s=PATIENCE_S, body=body)

    # What is known --------------------------------------------------------------------------------

    async def get(self, path: str) -> Any:
        url = f"{self.live.gateway_url}{path}"
        return await self.live.http.request_json("GET", url, Any, timeout_s=PATIENCE_S)

    async def latest(self) -> FollowedRequest | None:
        """The latest request that the gateway has received, also while it is in progress."""
        kept = await self.get(REQUESTS_PATH)
        if not kept["latest"]:
            return None
        found = await self.get(f"{REQUESTS_PATH}/{kept['latest'][0]['id']}")
        return msgspec.convert(found, FollowedRequest)

    async def check_cause(self, answer: TimedResponse, kind: str) -> None:
        """The cause that the command names first, as JSON and below the waterfall."""
        printed = await self._run("trace", answer.request_id)
        traced = json.loads(await self._run("trace", answer.request_id, "--json"))
        assert traced["causes"][0]["kind"] == kind, printed
        assert f"{kind}: " in printed

    async def _run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "prfaas", *arguments, "--gateway", self.live.gateway_url]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()

    # Processes ------------------------------------------------------------------------------------

    @property
    def relay(self) -> Child[Any]:
        """Of the link from far to near."""
        return self.live.hosts.children.named(f"wan-{FAR}-{NEAR}")

    def node(self, name: str) -> Child[Any]:
        return self.live.hosts.children.named(name)

    async def load(self, name: str) -> int:
        """The requests of a node, as the gateway knows them."""
        clusters = (await self.live.state())["clusters"]
        nodes = {node["node"]: node for cluster in clusters for node in cluster["nodes"]}
        return int(nodes[name].get("running", 0)) + int(nodes[name].get("waiting", 0))

    async def with_role(self, role: str) -> str:
        """The node near that has this role."""
        clusters = (await self.live.state())["clusters"]
        nodes = next(cluster["nodes"] for cluster in clusters if cluster["cluster"] == NEAR)
        return str(next(node["node"] for node in nodes if node["role"] == role))

    @asynccontextmanager
    async def directly(self, node: str) -> AsyncIterator[Target]:
        """An engine without a gateway."""
        url = self.live.hosts.engine_urls[node]
        async with connect(url, MonotonicClock()) as target:
            yield target


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(LOOK_S)
