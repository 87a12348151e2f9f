"""Drawn cases through real gateway processes, over stand-in hosts in this process.

`play` writes the deployment file of a case, starts its hosts and gateways, sends its traffic while
its events happen, and waits until nothing is under way any more. What it returns are accounts:
those of the clients, the gateways' log lines and metrics, the books of the hosts, and what was left
behind. `live_rules` judges them.

The traffic has a clock of its own, which stands still while a gateway starts. Everything else is
waited for, within limits that only a defect reaches.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from prfaas.config.write import toml
from prfaas.contracts.gateway_api import DRAIN_PATH
from prfaas.contracts.readiness import GatewayReady
from prfaas.launch.request_outcomes import RequestOutcome, parse_outcome
from prfaas.security.shared_key import bearer
from prfaas.tracing.context import TRACEPARENT
from tests.node.hosts import Process
from tests.promises.cases import PROMPT_TOKENS, Case, ClusterCase, EventCase, HomeTraffic
from tests.promises.stand_ins import MODEL, Pace, World, model_entry
from tests.secret_files import write_secret
from tests.waiting import PATIENCE_S

TRAFFIC_S = 2.5  # that the traffic takes; events begin and end at shares of it
REQUESTS = 20  # of a home that sends the rate it is planned for
ENGINE_S = 5.0  # the most that the prompts of a home take, one after the other
OUTPUT_TOKENS = 6
# Requests of homes that nobody is promised to serve are given up so long after all others.
UNSERVED_S = 1.0
AFTERWARDS = 3  # requests of a home after the restart that follows a drain
LOOK_S = 0.05
OPERATOR, MEMBER = "the-operator-key-of-the-case", "the-member-key-of-the-case"
TENANTS = {"calm": "the-key-of-the-calm-tenant", "flood": "the-key-of-the-flooding-tenant"}
_ACCELERATORS = {"pd": "h20", "prfaas": "h200"}
_FIXED_S = {"pd": 0.008, "prfaas": 0.005}  # of a prefill
_TOKEN_S = {"pd": 10e-6, "prfaas": 4e-6}
_STEP_S = 0.002
_NETS = itertools.count()

# Waits that are long beside a case; the others are the defaults.
QUICK = {"queue_s": 30.0, "first_plan_s": 0.5, "link_down_s": 1.0, "drain_s": 1.0}


# The file ----------------------------------------------------------------------------------------


def prefill_s(cluster: ClusterCase, tokens: int) -> float:
    """As the profile states it."""
    return _FIXED_S[cluster.kind] + _TOKEN_S[cluster.kind] * tokens


def catalog(case: Case) -> dict[str, Any]:
    profiles = []
    for kind, accelerator in _ACCELERATORS.items():
        points = [
            {"new": tokens, "seconds": _FIXED_S[kind] + _TOKEN_S[kind] * tokens}
            for tokens in (64, 1024, 16384)
        ]
        status = "measured" if case.deployment.measured else "estimated"
        record = {"model": MODEL, "accelerator": accelerator, "gpus": 8, "status": status}
        steps = [{"batch": 1, "step_s": _STEP_S}, {"batch": 64, "step_s": _STEP_S}]
        profiles.append({**record, "source": "stand-ins", "prefill": points, "decode": steps})
    return {"models": [model_entry()], "profiles": profiles}


def deployment(case: Case, hosts: dict[str, str], gateways: dict[str, str]) -> dict[str, Any]:
    """`hosts`: URLs of all stated nodes. `gateways`: URLs by home, where each has one."""
    drawn = case.deployment
    clusters = []
    for cluster in drawn.clusters:
        split = {"prefill": cluster.stated_prefill, "decode": cluster.stated_decode}
        clusters.append(
            {
                **{"name": cluster.name, "kind": cluster.kind, "gpus_per_instance": 8},
                **{"accelerator": _ACCELERATORS[cluster.kind], "gpus": 8 * len(cluster.nodes)},
                **(split if cluster.kind == "pd" and cluster.stated_prefill else {}),
                "nodes": [{"url": hosts[n], "kvd_url": hosts[n]} for n in cluster.nodes],
            }
        )
    links = [
        {"from": link.source, "to": link.target, "gbps": link.gbps, "rtt_ms": link.rtt_ms}
        for link in drawn.links
    ]
    return {
        "catalog": ["catalog.toml"],
        "model": {"name": MODEL, "max_tokens": 32_768},
        "workload": {
            **{"kind": "lognormal", "mu": 6.6, "sigma": 1.2, "min_tokens": 64},
            **{"max_tokens": 8192, "output_tokens": OUTPUT_TOKENS},
        },
        "slo": {"output_tokens_per_s": 100},
        "clusters": clusters,
        "links": links,
        "gateways": [{"cluster": home, "url": url} for home, url in gateways.items()],
        "scheduler": {"policy": case.policy, "correction": {"least_s": 0.002}},
        "gateway": {
            "timeouts": timeouts(case),
            "operator_key_file": "operator.key",
            "member_key_file": "member.key",
            "keys": [{"key": key, "tenant": tenant} for tenant, key in TENANTS.items()],
        },
    }


def timeouts(case: Case) -> dict[str, float]:
    found = dict(QUICK)
    if remembers_drains(case):
        # The first plan waits until the gateway knows what the kvds keep, but not for ever. It also
        # waits for nodes, and where some are absent, every start would take so long.
        found["first_plan_s"] = PATIENCE_S
    if not served_throughout(case):  # nobody is promised an answer, so that nobody needs patience
        found["queue_s"] = 2.0
    return found


# What is asked -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Asked:
    """One request, as its client sees it."""

    id: str
    home: str
    tenant: str
    at_s: float  # on the clock of the traffic
    prompt: list[int]
    max_tokens: int
    stream: bool
    leaves_s: float | None = None  # after so long the client leaves
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    problem: str = ""
    tokens: list[int] = field(default_factory=list)
    # completed, rejected, shed, failed, broken, cancelled, or: refused (no gateway listened), gone
    # (the gateway's process was lost), hung, garbled
    end: str = ""

    @property
    def is_valid(self) -> bool:
        return self.max_tokens > 0

    @property
    def trace_id(self) -> str:
        return hashlib.md5(self.id.encode()).hexdigest()

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": self.stream,
        }


def traffic(case: Case) -> list[Asked]:
    """All requests of a case, in the order in which they are sent."""
    rng = random.Random(case.seed)
    asked = [
        one
        for home in case.traffic
        for one in _at_home(case, home, random.Random(rng.getrandbits(64)))
    ]
    asked.sort(key=lambda one: one.at_s)
    for number, one in enumerate(asked):
        one.id = f"{case.seed}-{number}"
    return asked


def _at_home(case: Case, home: HomeTraffic, rng: random.Random) -> list[Asked]:
    floods = [e for e in case.events if e.kind == "flood" and e.what == home.home]
    times = [(rng.uniform(0, TRAFFIC_S), "calm") for _ in range(round(REQUESTS * home.rate) + 1)]
    for flood in floods:
        until = min(1.0, flood.until or 1.0)
        count = round(REQUESTS * home.rate * (flood.factor - 1) * (until - flood.at))
        flooding = "flood" if case.seed % 2 else "calm"
        within = (flood.at * TRAFFIC_S, until * TRAFFIC_S)
        times += [(rng.uniform(*within), flooding) for _ in range(count)]
    rng.shuffle(times)
    found: list[Asked] = []
    left_s = ENGINE_S
    for at_s, tenant in times:
        prompt = _prompt(home, found, rng)
        left_s -= _slowest_s(case, home.home, len(prompt))
        if left_s < 0 and found:
            break
        kind = rng.random()
        found.append(
            Asked(
                *("", home.home, tenant, at_s, prompt),
                max_tokens=0 if kind < 0.04 else rng.randint(1, 2 * OUTPUT_TOKENS),
                stream=rng.random() < 0.85,
                leaves_s=rng.uniform(0, 0.2) if kind > 0.93 else None,
            )
        )
    return found


def _prompt(home: HomeTraffic, earlier: Sequence[Asked], rng: random.Random) -> list[int]:
    shortest, longest = PROMPT_TOKENS[home.lengths]
    length = round(shortest * (longest / shortest) ** rng.random())
    prompt: list[int] = []
    if earlier and rng.random() < home.reuse:
        prompt = rng.choice(earlier).prompt[: longest - 32]
    return prompt + rng.choices(range(100_000), k=max(16, length - len(prompt)))


def _slowest_s(case: Case, home: str, tokens: int) -> float:
    """A prefill where it is slower: here, or at the PrfaaS clusters."""

    def fastest_s(clusters: Sequence[ClusterCase]) -> float:
        present = [(c, n) for c in clusters for n in c.nodes if n not in c.absent]
        paces = [case.deployment.pace(n) * prefill_s(c, tokens) for c, n in present]
        return min(paces, default=0.0)

    drawn = case.deployment
    return max(fastest_s([drawn.cluster(home)]), fastest_s(drawn.prfaas))


# Gateways ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """One process of a gateway."""

    home: str  # empty: it serves all
    process: Process
    started_s: float
    ready_s: float = math.inf
    killed_s: float | None = None
    metrics: str = ""  # at the end; empty: the process was killed
    state: Any = None

    @property
    def was_killed(self) -> bool:
        return self.killed_s is not None

    @property
    def lines(self) -> list[RequestOutcome]:
        told = (parse_outcome(line) for line in self.process.output.splitlines())
        return [one for one in told if one is not None]

    def counted(self) -> Counter[str]:
        """Requests by outcome, as the metrics say."""
        found = Counter[str]()
        for labels, value in re.findall(
            r"^prfaas_gateway_requests_total\{([^}]*)\} (\S+)$", self.metrics, re.M
        ):
            (outcome,) = re.findall(r'outcome="(\w+)"', labels)
            found[outcome] += int(float(value))
        return +found


@dataclass(slots=True)
class Drained:
    """An order to drain a cluster, and when all gateways that lived followed it."""

    cluster: str
    followed_s: float
    kept: bool
    returned_s: float = math.inf  # when its return was ordered


@dataclass(slots=True)
class Played:
    """The accounts of a case."""

    case: Case
    asked: list[Asked]
    runs: list[Run]
    world: World
    drains: list[Drained]
    left: list[str]  # what was left behind

    def outages(self, home: str) -> list[tuple[float, float]]:
        """When no gateway of this home listened: from each kill until the next one was ready."""
        runs = [run for run in self.runs if run.home in ("", home)]
        nexts = [*(run.ready_s for run in runs[1:]), math.inf]
        pairs = zip(runs, nexts, strict=True)
        return [(run.killed_s, ready_s) for run, ready_s in pairs if run.killed_s is not None]

    def log(self, chars: int) -> str:
        """The end of what every gateway has said."""
        return "\n".join(
            f"--- gateway {run.home}{' (killed)' if run.killed_s else ''}\n"
            + run.process.output[-chars:]
            for run in self.runs
        )


class Player:
    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._folder = folder
        net = f"127.{128 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        first = 100 + 40 * (next(_NETS) % 3)  # the sockets of the former case may linger
        addresses = (f"{net}.{first + n}" for n in itertools.count())
        drawn = case.deployment
        rates = {(link.source, link.target): link.gbps * 1e9 for link in drawn.links}
        self.world = World(lambda one, other: rates.get((one, other), 100e9))
        for cluster in drawn.clusters:
            for node in cluster.nodes:
                pace = Pace(
                    lambda tokens, of=cluster: prefill_s(of, tokens),
                    _STEP_S,
                    drawn.pace(node),
                )
                self.world.add(node, cluster.name, pace, next(addresses))
        each = drawn.gateway_per_home
        homes = [home.name for home in drawn.homes] if each else [""]
        self._urls = {home: f"http://{next(addresses)}:8080" for home in homes}
        self.runs: list[Run] = []
        self.drains: list[Drained] = []
        self._orders: dict[str, asyncio.Lock] = {c.name: asyncio.Lock() for c in drawn.clusters}
        self._lost = Counter[str]()  # events that keep a node lost
        self._cuts = Counter[str]()
        self._asked = traffic(case)
        self._serving = served_throughout(case)
        self._paused_s = 0.0
        self._write()

    def _write(self) -> None:
        urls = {name: host.url for name, host in self.world.hosts.items()}
        gateways = self._urls if self._case.deployment.gateway_per_home else {}
        raw = deployment(self._case, urls, gateways)
        (self._folder / "deployment.toml").write_text(toml(raw))
        (self._folder / "catalog.toml").write_text(toml(catalog(self._case)))
        write_secret(self._folder / "operator.key", f"{OPERATOR}\n")
        write_secret(self._folder / "member.key", f"{MEMBER}\n")

    # Processes -----------------------------------------------------------------------------------

    def _gateway_of(self, home: str) -> str:
        return home if home in self._urls else ""

    def _run_of(self, home: str) -> Run:
        name = self._gateway_of(home)
        return next(run for run in reversed(self.runs) if run.home == name)

    def _living(self) -> list[Run]:
        return [run for run in self.runs if run.killed_s is None]

    def _start(self, home: str) -> Run:
        host, _, port = self._urls[home].removeprefix("http://").partition(":")
        arguments = ["gateway", "deployment.toml", "--host", host, "--port", port]
        if home:
            arguments += ["--cluster", home]
        run = Run(home, Process(*arguments, folder=self._folder), time.monotonic())
        self.runs.append(run)
        return run

    async def _ready(self, run: Run) -> None:
        await asyncio.to_thread(run.process.ready, GatewayReady)
        run.ready_s = time.monotonic()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """All hosts that are present, and every gateway, which knows that they are alive."""
        present = {
            node
            for cluster in self._case.deployment.clusters
            for node in cluster.nodes
            if node not in cluster.absent
        }
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        try:
            async with (
                self.world.running(present),
                aiohttp.ClientSession(connector=connector) as self._http,
            ):
                for home in self._urls:
                    self._start(home)
                await asyncio.gather(*(self._ready(run) for run in self.runs))
                await self.until(self._all_alive(present), "all nodes are alive")
                yield
                await asyncio.gather(
                    *(asyncio.to_thread(run.process.stop) for run in self._living())
                )
        finally:
            for run in self._living():
                if run.process.popen.poll() is None:
                    await asyncio.to_thread(run.process.kill)

    async def play(self) -> Played:
        async with self.serving():
            await self._send_traffic()
            await self._remember_drains()
            left = await self._settle()
            await self._read_accounts()
        return Played(self._case, self._asked, self.runs, self.world, self.drains, left)

    def _all_alive(self, present: set[str]) -> Callable[[], Awaitable[bool]]:
        async def are_alive() -> bool:
            for run in self._living():
                nodes = _nodes(await self.state(run))
                if {node["node"] for node in nodes if node["alive"]} != present:
                    return False
            return True

        return are_alive

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await condition():  # noqa: ASYNC110  # nothing tells
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            logs = "\n".join(run.process.output[-3000:] for run in self.runs)
            raise AssertionError(f"it never came true that {what}\n{logs}") from None

    async def state(self, run: Run) -> Any:
        url = f"{self._urls[run.home]}/prfaas/v1/state"
        async with self._http.get(url, headers=bearer(OPERATOR)) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    # Traffic and events --------------------------------------------------------------------------

    async def _send_traffic(self) -> None:
        """Returns when every request has ended."""
        asking: dict[str, asyncio.Task[None]] = {}
        happening: list[asyncio.Task[None]] = []

        def ask(one: Asked) -> None:
            asking[one.id] = asyncio.create_task(self.ask(one))

        numbers = itertools.count()
        due: list[tuple[float, int, Callable[[], Awaitable[None] | None]]] = [
            (one.at_s, next(numbers), partial(ask, one)) for one in self._asked
        ]
        for event in self._case.events:
            begin, end = self._happens(event, happening)
            due.append((event.at * TRAFFIC_S, next(numbers), begin))
            if event.until is not None:
                due.append((event.until * TRAFFIC_S, next(numbers), end))
        begun_s = time.monotonic()
        for at_s, _, act in sorted(due):
            await asyncio.sleep(begun_s + self._paused_s + at_s - time.monotonic())
            waiting = act()
            if waiting is not None:
                await waiting
        await asyncio.gather(*happening)
        await self._wait_for(asking)

    async def _wait_for(self, asking: Mapping[str, asyncio.Task[None]]) -> None:
        """Those that nobody is promised to serve leave soon after the others have ended."""
        serving = [asking[o.id] for o in self._asked if o.home in self._serving and o.id in asking]
        await asyncio.gather(*serving)
        others = [task for task in asking.values() if not task.done()]
        if others:
            wait_s = UNSERVED_S if self._serving else PATIENCE_S
            await asyncio.wait(others, timeout=wait_s)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _remember_drains(self) -> None:
        """Where a cluster is still drained, all gateways are lost at once, and asked again."""
        if not any(drain.returned_s == math.inf for drain in self.drains):
            return
        asking = {}
        await asyncio.gather(*(self._kill(home) for home in self._urls))
        await asyncio.gather(*(self._restart(home) for home in self._urls))
        for home in self._case.deployment.homes:
            for number in range(AFTERWARDS):
                former = [one for one in self._asked if one.home == home.name and one.is_valid]
                if former:
                    one = replace(
                        random.Random(number).choice(former),
                        **{"id": f"{self._case.seed}-{home.name}-{number}", "leaves_s": None},
                        **{"tokens": [], "end": "", "problem": "", "status": 0},
                    )
                    self._asked.append(one)
                    asking[one.id] = asyncio.create_task(self.ask(one))
        await self._wait_for(asking)

    def _happens(
        self, event: EventCase, tasks: list[asyncio.Task[None]]
    ) -> tuple[Callable[[], Awaitable[None] | None], Callable[[], Awaitable[None] | None]]:
        """How an event begins, and how it ends."""
        what, hosts = event.what, self.world.hosts
        match event.kind:
            case "node_lost" | "cluster_lost":
                names = [name for name in hosts if what in (name, hosts[name].cluster)]
                return lambda: self._lose(names), lambda: self._return(names)
            case "slow":
                pace = hosts[what].pace

                def times(factor: float) -> None:
                    pace.slowness *= factor

                return lambda: times(event.factor), lambda: times(1 / event.factor)
            case "link_cut" | "link_thin":
                share = 0.0 if event.kind == "link_cut" else event.factor
                source, _, target = what.partition(">")
                link = self.world.between(source, target)
                return lambda: link.limits.append(share), lambda: link.limits.remove(share)
            case "drained":

                def order(drained: bool) -> None:
                    tasks.append(asyncio.create_task(self._drain(what, drained=drained)))

                return lambda: order(True), lambda: order(False)
            case "gateway_killed":
                return lambda: self._kill(what), lambda: self._restart(what)
            case "flood":
                return lambda: None, lambda: None

    async def _lose(self, names: Sequence[str]) -> None:
        self._lost.update(names)
        await asyncio.gather(*(self.world.hosts[name].lose() for name in names))

    async def _return(self, names: Sequence[str]) -> None:
        self._lost.subtract(names)
        absent = {name for cluster in self._case.deployment.clusters for name in cluster.absent}
        for name in names:
            if not self._lost[name] and name not in absent:
                await self.world.hosts[name].start()

    async def _kill(self, home: str) -> None:
        run = self._run_of(home)
        if run.killed_s is None:
            run.killed_s = time.monotonic()
            await asyncio.to_thread(run.process.kill)

    async def _restart(self, home: str) -> None:
        """The traffic waits until it listens."""
        if self._run_of(home).killed_s is not None:
            begun_s = time.monotonic()
            await self._ready(self._start(self._gateway_of(home)))
            self._paused_s += time.monotonic() - begun_s

    async def _drain(self, cluster: str, *, drained: bool) -> None:
        """An operator's order, at the first gateway that lives."""
        async with self._orders[cluster]:
            if not drained:
                for order in self.drains:
                    if order.cluster == cluster:
                        order.returned_s = min(order.returned_s, time.monotonic())
            kept = await self.order(cluster, drained=drained)
            if kept is None or not drained:
                return
            kills = any(event.kind == "gateway_killed" for event in self._case.events)
            if not kept and not kills and keeps_records(self._case):
                # The gateway goes on trying, on a machine that is too busy to do it at once.
                told = f"the kvds keep the drain of {cluster}"
                await self.until(partial(self._say_all, cluster, "order_kept"), told)
                kept = True
            if kept:
                told = f"every gateway drains {cluster}"
                await self.until(partial(self._say_all, cluster, "drained"), told)
            if kept or len(self._urls) == 1:
                self.drains.append(Drained(cluster, time.monotonic(), kept))

    async def _say_all(self, cluster: str, what: str) -> bool:
        """Whether every gateway that lives says this of a cluster."""
        for run in self._living():
            with suppress(aiohttp.ClientError):  # it may be killed meanwhile
                state = await self.state(run)
                if not all(one[what] for one in state["clusters"] if one["cluster"] == cluster):
                    return False
        return True

    async def order(self, cluster: str, *, drained: bool, at: Run | None = None) -> bool | None:
        """Whether the kvds keep it; None: no gateway has received it. `at`: the gateway that is to
        receive it, instead of the first one that lives."""
        for run in self._living() if at is None else (at,):
            url = f"{self._urls[run.home]}{DRAIN_PATH}"
            body = {"cluster": cluster, "drained": drained}
            with suppress(aiohttp.ClientError):
                async with (
                    asyncio.timeout(PATIENCE_S),
                    self._http.post(url, json=body, headers=bearer(OPERATOR)) as response,
                ):
                    assert response.status == 200, await response.text()
                    return bool((await response.json())["kept"])
        return None

    # Requests ------------------------------------------------------------------------------------

    async def ask(self, one: Asked) -> None:
        one.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(one.leaves_s or PATIENCE_S):
                await self._exchange(one)
        except TimeoutError:
            one.end = "hung" if one.leaves_s is None else "cancelled"
        except asyncio.CancelledError:
            one.end = "cancelled"
            raise
        except aiohttp.ClientConnectorError as error:
            one.end, one.problem = "refused", str(error)
        except (aiohttp.ClientError, OSError) as error:
            one.end, one.problem = "gone", repr(error)
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            one.end, one.problem = "garbled", repr(error)
        finally:
            one.ended_s = time.monotonic()

    async def _exchange(self, one: Asked) -> None:
        url = f"{self._urls[self._gateway_of(one.home)]}/v1/completions"
        headers = {
            **bearer(TENANTS[one.tenant]),
            "X-Request-Id": one.id,
            "X-Prfaas-Cluster": one.home,
            TRACEPARENT: f"00-{one.trace_id}-{'1' * 16}-01",
        }
        async with self._http.post(url, json=one.body, headers=headers) as response:
            one.status = response.status
            if response.status != 200:
                error = (await response.json())["error"]
                one.problem = f"{error['code']}: {error['message']}"
                one.end = _named(response.status, error["code"])
                return
            if not one.stream:
                one.tokens = (await response.json())["choices"][0]["token_ids"]
                one.end = "completed"
                return
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    one.end = "completed"
                elif data:
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        one.end, one.problem = "broken", str(event["error"])
                    for choice in event.get("choices", ()):
                        one.tokens += choice["token_ids"]
            one.end = one.end or "gone"

    # Afterwards ----------------------------------------------------------------------------------

    async def _settle(self) -> list[str]:
        """What is still booked after all requests have ended, once nothing changes any more."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            left = self._left_behind()
            for run in self._living():
                run.state = await self.state(run)
                found = [*_booked(run.state), *self._forgotten(run.state)]
                left += [f"gateway {run.home}: {what}" for what in found]
            if not left or time.monotonic() > until_s:
                return left
            await asyncio.sleep(LOOK_S)

    def _forgotten(self, state: Any) -> list[str]:
        """Drains that a gateway does not follow, although a majority of the kvds has kept them."""
        follows = {one["cluster"] for one in state["clusters"] if one["drained"]}
        return [
            f"{drain.cluster} is drained, and used"
            for drain in self.drains
            if drain.kept and drain.returned_s == math.inf and drain.cluster not in follows
            if keeps_records(self._case)
        ]

    def _left_behind(self) -> list[str]:
        """A gateway that was killed has released nothing: its grants expire."""
        orphans = {one.trace_id for one in self._asked if self._outlived_its_gateway(one)}
        return self.world.left_behind(lambda transfer: transfer.traceparent[3:35] in orphans)

    def _outlived_its_gateway(self, one: Asked) -> bool:
        home = self._gateway_of(one.home)
        kills = (run.killed_s for run in self.runs if run.home == home)
        return any(killed_s is not None and one.sent_s < killed_s for killed_s in kills)

    async def _read_accounts(self) -> None:
        for run in self._living():

            async def is_idle(run: Run = run) -> bool:
                url = f"{self._urls[run.home]}/metrics"
                async with self._http.get(url, headers=bearer(OPERATOR)) as response:
                    run.metrics = await response.text()
                return "\nprfaas_gateway_requests_in_flight 0.0\n" in run.metrics

            await self.until(is_idle, "no request is in flight")


def _named(status: int, code: str) -> str:
    if status in (429, 503):
        return "shed"
    if status < 500:
        return "rejected"
    return "broken" if code == "engine_lost" else "failed"


def _nodes(state: Any) -> list[Any]:
    return [node for cluster in state["clusters"] for node in cluster["nodes"]]


def _booked(state: Any) -> list[str]:
    found = [
        f"{node['node']} has {node[what]} {what}"
        for node in _nodes(state)
        for what in ("queued", "active", "running", "waiting")
        if node["alive"] and node.get(what)
    ]
    found += [f"{n} requests {w}" for w, n in state["requests"].items() if n and w != "waiting_for"]
    found += [
        f"{link['pending_bytes']} bytes pend from {link['from']} to {link['to']}"
        for link in state["links"]
        if link["pending_bytes"]
    ]
    for tenant, counts in state["tenants"].items():
        booked = ("in_flight", "queued", "queued_tokens", "body_bytes")
        found += [f"tenant {tenant} has {counts[w]} {w}" for w in booked if counts[w]]
    return found


def served_throughout(case: Case) -> set[str]:
    """Homes that are promised to be served: a node there, or at a PD cluster to which a link leads,
    lives and may be used from the beginning to the end."""
    drawn = case.deployment
    touched = {e.what for e in case.events if e.kind in ("node_lost", "cluster_lost", "drained")}
    own = {
        home.name
        for home in drawn.homes
        if home.name not in touched
        and any(n not in touched and n not in home.absent for n in home.nodes)
    }
    homes = {home.name for home in drawn.homes}
    return own | {link.source for link in drawn.links if link.target in own} & homes


def keeps_records(case: Case) -> bool:
    """Whether a majority of the kvds lives from the beginning to the end."""
    lost = {event.what for event in case.events if event.kind in ("node_lost", "cluster_lost")}
    clusters = case.deployment.clusters
    nodes = [(cluster, node) for cluster in clusters for node in cluster.nodes]
    gone = [n for c, n in nodes if n in c.absent or {n, c.name} & lost]
    return 2 * len(gone) < len(nodes)


def remembers_drains(case: Case) -> bool:
    """Whether all kvds live all the time. A gateway that starts again learns from them which
    clusters are drained, before it serves a request."""
    kinds = {event.kind for event in case.events}
    is_whole = not any(cluster.absent for cluster in case.deployment.clusters)
    return "drained" in kinds and is_whole and not kinds & {"node_lost", "cluster_lost"}


async def play(case: Case, folder: Path) -> Played:
    return await Player(case, folder).play()
