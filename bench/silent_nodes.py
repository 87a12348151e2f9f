"""How soon requests get their first token elsewhere when a node is stopped (SIGSTOP).

\b
    python bench/silent_nodes.py [--stops 100] [--nodes 100]      nodes stopped one after the other
    python bench/silent_nodes.py --pause-gateway 15               the gateway itself is stopped
    python bench/silent_nodes.py --minutes 10                     nothing is stopped

Nodes are light processes (`bench/_held_node.py`), each a node and its kvd in one, behind a real
gateway with its default timeouts. In each round requests are sent until one waits, without a first
token, at a node that was not stopped yet: in turn a decode node, a PrfaaS node and a local prefill
node. This node is stopped, the other requests go on, and further requests follow at once, before
the gateway can know. The node continues after the round. Prints JSON:

\b
  nodes             node processes
  stops             how many stops there were, of `different_nodes` nodes
  first_token_s     p50, p99 and max of the time from the stop until the first token of the request
                    that waited at the stopped node
  other_s           the same for the other requests of the rounds, from the stop or their start
  detected_s        from the stop until the gateway's log says that the node is silent
  wrongly_given_up  nodes that the gateway called silent though they were not stopped
  failed            requests that did not end with all their tokens
  retries           as the gateway counts them
  gateway_cpu       CPU seconds of the gateway per second
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

HERE = Path(__file__).parent
MODEL = "case-study-1t"
START_S = 120.0
PATIENCE_S = 60.0
# Tokens of a prompt. Prompts above the threshold are prefilled by PrfaaS nodes; all are short.
REMOTE, LOCAL = 300, 150
KINDS = (("decode", REMOTE), ("prefill", REMOTE), ("prefill", LOCAL))
_SILENT = re.compile(r"(n\d{3}) has fallen silent: ")

DEPLOYMENT = """
[model]
name = "{model}"
[workload]
kind = "lognormal"
mu = 7.0
sigma = 1.00
min_tokens = 128
max_tokens = 131072
output_tokens = 64
[slo]
output_tokens_per_s = 40
[scheduler]
policy = "paper"
threshold_tokens = 200
[[clusters]]
name = "prfaas"
kind = "prfaas"
accelerator = "h200"
gpus = {remote_gpus}
gpus_per_instance = 8
nodes = [{remote}]
[[clusters]]
name = "pd"
kind = "pd"
accelerator = "h20"
gpus = {local_gpus}
gpus_per_instance = 8
prefill = {prefill}
decode = {decode}
nodes = [{local}]
[[links]]
from = "prfaas"
to = "pd"
gbps = 100
rtt_ms = 0
[gateway]
port = 0
advise = true
"""


# Processes ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    name: str
    port: int
    pid: int
    stopped: bool = False


@dataclass(slots=True)
class Gateway:
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def silent(self) -> list[str]:
        return _SILENT.findall(self.log.read_text())

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/prfaas/v1/state", timeout=PATIENCE_S) as page:
            found: dict[str, Any] = json.load(page)
            return found

    def cpu_s(self) -> float:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started_nodes(count: int, udp_port: int) -> Iterator[list[Node]]:
    command = [sys.executable, str(HERE / "_held_node.py"), str(count), str(udp_port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        try:
            nodes = []
            for line in itertools.islice(parent.stdout, count):
                name, port, pid = line.decode().split()
                nodes.append(Node(name, int(port), int(pid)))
            yield nodes
        finally:
            parent.stdin.close()  # it ends its processes
            parent.wait(PATIENCE_S)


@contextmanager
def started_gateway(folder: Path, nodes: list[Node]) -> Iterator[Gateway]:
    remote = max(1, len(nodes) // 5)
    local = len(nodes) - remote
    prefill = max(1, local // 4)

    def listed(some: list[Node]) -> str:
        urls = [f"http://127.0.0.1:{node.port}" for node in some]
        return ", ".join(f'{{ url = "{url}", kvd_url = "{url}" }}' for url in urls)

    path, log = folder / "deployment.toml", folder / "gateway.log"
    path.write_text(
        DEPLOYMENT.format(
            model=MODEL,
            remote=listed(nodes[:remote]),
            remote_gpus=8 * remote,
            local=listed(nodes[remote:]),
            local_gpus=8 * local,
            prefill=prefill,
            decode=local - prefill,
        )
    )
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "prfaas", "gateway", str(path)],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and process.poll() is None:
            found = re.search(r'"http":\s*"(http://[^"]+)"', log.read_text())
            if found:
                gateway = Gateway(process, log, found[1])
                clusters = gateway.state()["clusters"]
                if all(node.get("in_use") for c in clusters for node in c["nodes"]):
                    yield gateway
                    return
            time.sleep(0.2)
        raise click.ClickException(f"the gateway has no nodes:\n{log.read_text()[-2000:]}")
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(PATIENCE_S)


# Requests -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Asked:
    key: str  # the first token of its prompt, by which nodes name it
    sent_s: float
    first_s: float = float("nan")
    problem: str = ""


class Notices(asyncio.DatagramProtocol):
    """What the nodes report. Every response is released at once, unless it is to be held."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._committed: set[str] = set()
        self._waiting: dict[str, list[object]] = {}  # commits, by transfer
        self.stop_next: str | None = None  # the kind of call whose node is stopped next
        self._held: list[tuple[str, str, object]] = []  # kind, key, sender
        self.moved = asyncio.Event()  # a call of this kind has arrived
        self.victim: Node | None = None
        self.stopped_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: object) -> None:
        kind, key, name, _ = data.decode().split()
        node = self.nodes[name]
        if kind == self.stop_next and not node.stopped:
            os.kill(node.pid, signal.SIGSTOP)
            self.stopped_s = time.monotonic()
            node.stopped = True
            self.victim = node
            self.release()
            return
        if kind == self.stop_next:
            # It stays there, so that the gateway sends the next request to another node.
            self._held.append((kind, key, addr))
            self.moved.set()
            return
        self._pass(kind, key, addr)

    def release(self) -> None:
        """No further node is stopped, and what was held for that goes on."""
        self.stop_next = None
        self.moved.set()
        for held in self._held:
            self._pass(*held)
        self._held.clear()

    def _pass(self, kind: str, key: str, addr: object) -> None:
        if kind == "commit" and key not in self._committed:
            self._waiting.setdefault(key, []).append(addr)
            return
        self._release(f"{kind} {key}", addr)
        if kind == "prefill":
            self._committed.add(key)
            for waiting in self._waiting.pop(key, []):
                self._release(f"commit {key}", waiting)

    def _release(self, what: str, addr: object) -> None:
        self._transport.sendto(what.encode(), cast(tuple[str, int], addr))


async def ask(
    port: int, numbers: Iterator[int], rng: np.random.Generator, tokens: int = REMOTE
) -> Asked:
    key = next(numbers)
    prompt = [key, *rng.integers(0, 100_000, tokens - 1).tolist()]
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": True}).encode()
    asked = Asked(str(key), time.monotonic())
    writer = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            answer = b""
            while part := await reader.read(65536):
                answer += part
                if b"data:" in answer and not asked.first_s > 0:
                    asked.first_s = time.monotonic()
        if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer:
            asked.problem = answer[-300:].decode(errors="replace") or "no answer"
    except (OSError, TimeoutError) as error:
        asked.problem = repr(error)
    finally:
        if writer is not None:
            writer.close()
    return asked


def quantiles(seconds: list[float]) -> dict[str, float | int]:
    values = [value for value in seconds if value == value]
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "p50": round(float(np.quantile(values, 0.5)), 3),
        "p99": round(float(np.quantile(values, 0.99)), 3),
        "max": round(max(values), 3),
    }


# Modes --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Results:
    first_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    detected_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    requests: int = 0
    stopped: int = 0  # different nodes


async def stop_nodes(
    gateway: Gateway, nodes: list[Node], notices: Notices, stops: int, each: int
) -> Results:
    found, rng, numbers = Results(), np.random.default_rng(1), itertools.count(1000)
    stopped: Counter[str] = Counter()
    kinds = list(KINDS)
    while len(found.detected_s) < stops:
        if not kinds:  # more stops than nodes
            kinds = list(KINDS)
            for node in nodes:
                node.stopped = False
        kind, tokens = kinds[len(found.detected_s) % len(kinds)]

        def send(tokens: int = tokens) -> asyncio.Task[Asked]:
            return asyncio.create_task(ask(gateway.port, numbers, rng, tokens))

        notices.victim, notices.stop_next = None, kind
        calls: list[asyncio.Task[Asked]] = []
        while notices.victim is None and len(calls) <= len(nodes):
            notices.moved.clear()
            calls.append(send())
            async with asyncio.timeout(PATIENCE_S):
                await notices.moved.wait()
        victim, stopped_s = notices.victim, notices.stopped_s
        if victim is None:  # all nodes of this kind were stopped
            kinds.remove((kind, tokens))
            notices.release()
        calls += [send() for _ in range(each)]
        if victim is not None:
            stopped[victim.name] += 1
            while gateway.silent().count(victim.name) < stopped[victim.name]:
                if time.monotonic() > stopped_s + PATIENCE_S:
                    break
                await asyncio.sleep(0.02)
            found.detected_s.append(time.monotonic() - stopped_s)
        answers = await asyncio.gather(*calls)
        found.requests += len(answers)
        found.problems += [asked.problem for asked in answers if asked.problem]
        if victim is None:
            continue
        os.kill(victim.pid, signal.SIGCONT)
        # The request whose arrival stopped the node was the latest before the stop.
        waited = answers[-each - 1]
        for asked in answers:
            since_s = asked.first_s - max(stopped_s, asked.sent_s)
            (found.first_s if asked is waited else found.other_s).append(since_s)
    found.stopped = len(stopped)
    return found


async def steady(gateway: Gateway, seconds: float, rate: float) -> Results:
    """Requests at a steady rate."""
    found, rng, numbers = Results(), np.random.default_rng(1), itertools.count(1000)
    calls: set[asyncio.Task[Asked]] = set()
    begun_s = time.monotonic()
    for number in itertools.count():
        due_s = begun_s + number / rate
        if due_s > begun_s + seconds:
            break
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        calls.add(asyncio.create_task(ask(gateway.port, numbers, rng)))
    for asked in await asyncio.gather(*calls):
        found.requests += 1
        found.other_s.append(asked.first_s - asked.sent_s)
        if asked.problem:
            found.problems.append(asked.problem)
    return found


async def pause(gateway: Gateway, seconds: float, rate: float) -> Results:
    running = asyncio.create_task(steady(gateway, seconds + 20.0, rate))
    await asyncio.sleep(5.0)
    gateway.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        gateway.process.send_signal(signal.SIGCONT)
    return await running


@click.command(help=__doc__)
@click.option("--stops", default=100, show_default=True, help="Stops of nodes.")
@click.option("--nodes", default=100, show_default=True, help="Node processes.")
@click.option("--each", default=3, show_default=True, help="Requests right after each stop.")
@click.option("--pause-gateway", type=float, help="Stop the gateway for so many seconds instead.")
@click.option("--minutes", type=float, help="Stop nothing for so many minutes instead.")
@click.option("--rate", default=5.0, show_default=True, help="Requests per second in these modes.")
def main(
    stops: int,
    nodes: int,
    each: int,
    pause_gateway: float | None,
    minutes: float | None,
    rate: float,
) -> None:
    async def measure() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        transport, notices = await loop.create_datagram_endpoint(
            Notices, local_addr=("127.0.0.1", 0)
        )
        udp_port = transport.get_extra_info("sockname")[1]
        with tempfile.TemporaryDirectory() as name, started_nodes(nodes, udp_port) as running:
            notices.nodes.update({node.name: node for node in running})
            with started_gateway(Path(name), running) as gateway:
                begun_s, cpu_s = time.monotonic(), gateway.cpu_s()
                mode = "stops"
                if pause_gateway is not None:
                    mode = f"the gateway stopped for {pause_gateway:g} s"
                    found = await pause(gateway, pause_gateway, rate)
                elif minutes is not None:
                    mode = f"nothing stopped for {minutes:g} minutes"
                    found = await steady(gateway, 60 * minutes, rate)
                else:
                    found = await stop_nodes(gateway, running, notices, stops, each)
                wall_s = time.monotonic() - begun_s
                silent, retries = gateway.silent(), gateway.state()["retries"]
                cpu = (gateway.cpu_s() - cpu_s) / wall_s
        transport.close()
        stopped = {node.name for node in running if node.stopped}
        wrong = [name for name in silent if name not in stopped]
        extra = max(0, len(silent) - len(wrong) - len(found.detected_s))
        return {
            "mode": mode,
            "nodes": nodes,
            "stops": len(found.detected_s),
            "different_nodes": found.stopped,
            "requests": found.requests,
            "first_token_s": quantiles(found.first_s),
            "other_s": quantiles(found.other_s),
            "detected_s": quantiles(found.detected_s),
            "wrongly_given_up": len(wrong) + extra,
            "failed": len(found.problems),
            "first_problem": found.problems[0] if found.problems else None,
            "retries": retries,
            "gateway_cpu": round(cpu, 3),
            "load": os.getloadavg(),
        }

    with suppress(KeyboardInterrupt):
        click.echo(json.dumps(asyncio.run(measure()), indent=2))


if __name__ == "__main__":
    main()
