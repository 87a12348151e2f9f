"""A deployment as `prfaas init` writes it, whose remote site can be lost and can return.

Every address of 127.0.0.0/8 is a host. The processes are those that `prfaas init` prints, over
mutual TLS, with emulated engines at their real speed; only the bytes of the KV are fewer. The
remote site is reached through relays on its own addresses, so that the path to it can be cut:

    gateway ── 9000, 9401 ──► relay ── 8000, 7401 ──► remote node, kvd
    remote kvd ── 9400 ─────► relay ── 7400 ────────► each local kvd
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from prfaas.config.address import Address
from prfaas.contracts.readiness import GatewayReady, KvdReady, NodeReady
from prfaas.launch.request_outcomes import RequestOutcome, parse_outcome
from prfaas.security.shared_key import bearer
from prfaas.security.tls import client_context, trust_context
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.node.hosts import START_S, Process
from tests.waiting import PATIENCE_S

PLAN = Path(__file__).parents[2] / "configs" / "case_study.toml"
REMOTE = "prfaas"  # the cluster; its only host is `prfaas-0`
SHORT, LONG = 300, 30_000  # tokens; a long prompt is worth the way, under every policy but `local`
OUTPUT_TOKENS = 4
# What a client is promised while one node that decodes is alive, whatever happened to the others.
ANSWER_S = 10.0
FIRST_S = ANSWER_S + 3.0  # of the first request after the loss, which may meet the dead node
LOOK_S = 0.2
_NETS = count()


class Shape(NamedTuple):
    """Where the hosts are. Names and addresses break ties in many places."""

    local_hosts: int
    is_local_first: bool  # the addresses of the local hosts are below the remote one's

    @property
    def name(self) -> str:
        return f"{self.local_hosts}-{'below' if self.is_local_first else 'above'}"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    tokens: list[int]
    request: str
    error: str = ""


class Client:
    """A tenant and the operator, with the files that `prfaas init` gives to each."""

    def __init__(self, deployment: PromisedDeployment, http: aiohttp.ClientSession) -> None:
        self._deployment = deployment
        self._http = http

    async def ask(self, prompt: Sequence[int], within_s: float) -> Answer:
        """The whole answer; status 0 when it is not there in time."""
        try:
            return await self._ask(prompt, within_s)
        except TimeoutError:
            return Answer(0, [], "", f"no answer within {within_s:g} s")

    async def _ask(self, prompt: Sequence[int], within_s: float) -> Answer:
        body = {
            "prompt": list(prompt),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with (
            asyncio.timeout(within_s),
            self._http.post(
                f"{self._deployment.url}/v1/completions",
                json=body,
                headers=self._deployment.key("client/tenant.key"),
            ) as response,
        ):
            text = await response.text()
        request = response.headers["X-Request-Id"]
        if response.status != 200:
            return Answer(response.status, [], request, text)
        return Answer(200, json.loads(text)["choices"][0]["token_ids"], request)

    async def is_ready(self) -> bool:
        async with self._http.get(f"{self._deployment.url}/ready") as response:
            return response.status == 200

    async def state(self) -> Any:
        async with self._http.get(
            f"{self._deployment.url}/prfaas/v1/state",
            headers=self._deployment.key("operator/operator.key"),
        ) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def until_ready(self) -> None:
        await _until(self.is_ready)

    async def until_all_are_in_use(self) -> None:
        """And nothing is drained."""

        async def do_all() -> bool:
            nodes = [n for c in (await self.state())["clusters"] for n in c["nodes"]]
            used = {node["node"] for node in nodes if node["alive"] and node.get("in_use")}
            return used == set(self._deployment.names)

        await _until(do_all)

    async def until_offloaded(self) -> None:
        """Sends long prompts until one is prefilled at the remote site."""

        async def is_offloaded() -> bool:
            answer = await self.ask(new_prompt(LONG), PATIENCE_S)
            assert answer.status == 200, answer
            return (await self.outcome(answer.request)).prefill == f"{REMOTE}-0"

        await _until(is_offloaded)

    async def outcome(self, request: str) -> RequestOutcome:
        """The request's line in the gateway's log."""
        found: list[RequestOutcome] = []

        async def is_logged() -> bool:
            lines = self._deployment.gateway_output.splitlines()
            told = (parse_outcome(line) for line in lines if request in line)
            found.extend(one for one in told if one is not None)
            return bool(found)

        await _until(is_logged)
        return found[0]


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(LOOK_S)


_SEEDS = count()


def new_prompt(tokens: int) -> list[int]:
    """No two have a prefix in common, so that nothing of them is cached."""
    return random.Random(f"promise {next(_SEEDS)}").choices(range(32, 127), k=tokens)


class PromisedDeployment:
    """`names`: of the nodes. The processes are `kvd-NAME`, `node-NAME` and `gateway`."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape = shape
        self.folder = folder / "dep"
        net = f"127.{128 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        first = 1 + 8 * next(_NETS)  # of the addresses; other test runs have other networks
        local = [f"{net}.{first + 1 + n}" for n in range(shape.local_hosts)]
        self._remote = f"{net}.{first + (7 if shape.is_local_first else 0)}"
        told = subprocess.run(
            [
                *(sys.executable, "-m", "prfaas", "init", str(self.folder), "--json"),
                *("--plan", str(PLAN), "--engine", "emulated", "--memory", "512MiB"),
                *("--pd", f"pd={','.join(local)}", "--prfaas", f"{REMOTE}={self._remote}"),
            ],
            check=True,
            capture_output=True,
            timeout=START_S,
        ).stdout
        summary = json.loads(told)
        self.url: str = summary["gateway"]
        self._commands = {
            "-".join(filter(None, (one["service"], one["name"]))): (
                Path(host["folder"]),
                shlex.split(one["command"])[1:],
            )
            for host in summary["hosts"]
            for one in host["commands"]
        }
        self.names = [name.removeprefix("node-") for name in self._commands if "node" in name]
        self.local = [name for name in self.names if name != f"{REMOTE}-0"]
        self._hosts = {f"{REMOTE}-0": self._remote, **dict(zip(self.local, local, strict=True))}
        self._running: dict[str, Process] = {}
        self.policy = ""  # of the running gateway
        self.is_whole = False  # as its last case has left it
        self._relay = self._write_detours()

    # Files ----------------------------------------------------------------------------------------

    def _write_detours(self) -> Relay:
        """Leads the path between the sites through a relay, and scales bytes."""
        remote = self._remote
        pairs = [(Address(remote, 9000), Address(remote, 8000))]
        pairs.append((Address(remote, 9401), Address(remote, 7401)))
        gateway, _ = self._commands["gateway"]
        text = (gateway / "deployment.toml").read_text()
        text = _changed(text, f'url = "https://{remote}:8000"', f'url = "https://{remote}:9000"')
        text = _changed(text, f"https://{remote}:7401", f"https://{remote}:9401")
        for name in self.local:
            host = self._hosts[name]
            pairs.append((Address(host, 9400), Address(host, 7400)))
            kvd_url = f'kvd_url = "https://{host}:7401"'
            text = _changed(text, kvd_url, f'{kvd_url}, via = {{ {REMOTE} = "{host}:9400" }}')
        (gateway / "deployment.toml").write_text(text)
        for name in self.names:
            file = self._commands[f"node-{name}"][0] / "host.toml"
            text = _changed(file.read_text(), "emulated = {", "emulated = { byte_scale = 0.01,")
            if name not in self.local:
                # It does not register itself: the gateway would learn the way around the relay.
                lines = [line for line in text.splitlines() if not line.startswith("gateways")]
                text = "\n".join([*lines, ""]).replace(
                    "[node]\n", f'[node]\nadvertise = "https://{remote}:9000"\n'
                )
                text = _changed(
                    text, f'kvd_url = "https://{remote}:7401"', f'kvd_url = "https://{remote}:9401"'
                )
            file.write_text(text)
        (listen, target), *more = pairs
        return Relay(listen, target, Conditions(), also=more).start()

    def key(self, name: str) -> dict[str, str]:
        """The header with the key that is in this file of the folder."""
        return bearer((self.folder / name).read_text().strip())

    # Processes ------------------------------------------------------------------------------------

    def _start(self, *names: str) -> None:
        for name in names:
            if name not in self._running:
                folder, arguments = self._commands[name]
                self._running[name] = Process(*arguments, folder=folder)
        for name in names:
            kind = {"kvd": KvdReady, "node": NodeReady}.get(name.partition("-")[0], GatewayReady)
            self._running[name].ready(kind)

    def kill(self, *names: str) -> None:
        """With SIGKILL, those of them that run."""
        for name in names:
            if name in self._running:
                self._running.pop(name).kill()

    def _start_hosts(self, names: Sequence[str]) -> None:
        self._start(*(f"kvd-{name}" for name in names))
        self._start(*(f"node-{name}" for name in names))

    def start_remote(self) -> None:
        self._start_hosts([f"{REMOTE}-0"])

    def kill_remote(self, *services: str) -> None:
        self.kill(*(f"{service}-{REMOTE}-0" for service in services))

    def start_without_remote(self, policy: str) -> None:
        """All anew, and the remote site has never been there."""
        self.kill(*list(self._running))
        self._relay.restore()
        self._start_hosts(self.local)
        self._start_gateway(policy)

    def start_with_remote(self, policy: str) -> None:
        """What does not run; another policy needs another gateway. After a case that has failed,
        all is started anew: no case depends on another."""
        if not self.is_whole:
            self.kill(*list(self._running))
            self._relay.restore()
        self._start_hosts(self.names)
        if policy != self.policy or "gateway" not in self._running:
            self.kill("gateway")
            self._start_gateway(policy)

    def _start_gateway(self, policy: str) -> None:
        file = self._commands["gateway"][0] / "deployment.toml"
        lines = file.read_text().splitlines()
        changed = [
            f'policy = "{policy}"' if line.startswith("policy =") else line for line in lines
        ]
        file.write_text("\n".join([*changed, ""]))
        self._start("gateway")
        self.policy = policy

    @property
    def gateway_output(self) -> str:
        return self._running["gateway"].output

    def cut(self) -> None:
        """Nothing passes between the sites, and new connections are refused."""
        self._relay.outage()

    def stall(self) -> None:
        """Nothing passes between the sites, and no end hears of it."""
        self._relay.stall()

    def restore(self) -> None:
        self._relay.restore()

    def drain(self, *more: str) -> None:
        """`prfaas drain` as the operator calls it."""
        operator = self.folder / "operator"
        subprocess.run(
            [
                *(sys.executable, "-m", "prfaas", "drain", REMOTE, "--gateway", self.url),
                *("--operator-key-file", str(operator / "operator.key"), "--no-wait"),
                *("--tls-ca", str(operator / "ca.pem"), "--tls-cert", str(operator / "cert.pem")),
                *("--tls-key", str(operator / "key.pem"), *more),
            ],
            check=True,
            timeout=START_S,
            stdout=subprocess.DEVNULL,
        )

    def close(self) -> None:
        self.kill("gateway", *list(self._running))
        self._relay.close()

    # Requests -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        trusted = trust_context(self.folder / "client" / "ca.pem")
        connector = aiohttp.TCPConnector(ssl=trusted, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            yield Client(self, http)

    async def question(self) -> tuple[list[int], list[int]]:
        """A short prompt that the gateway has not seen, and the tokens that a local node answers
        when it is asked without a gateway."""
        prompt = new_prompt(SHORT)
        host, (folder, _) = self._hosts[self.local[0]], self._commands[f"node-{self.local[0]}"]
        member = client_context(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
        body = {
            **{"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0},
            **{"ignore_eos": True, "return_token_ids": True, "cache_salt": "another"},
        }
        connector = aiohttp.TCPConnector(ssl=member, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            asyncio.timeout(PATIENCE_S),
            http.post(
                f"https://{host}:8000/v1/completions",
                json=body,
                headers=bearer((folder / "member.key").read_text().strip()),
            ) as response,
        ):
            assert response.status == 200, await response.text()
            return prompt, (await response.json())["choices"][0]["token_ids"]


def _changed(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)
