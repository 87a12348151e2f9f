"""What open consoles cost the gateway.

\b
    python -m prfaas_lab bench console [--nodes 200] [--watchers 10] [--rate 5] [--rounds 5]

A real gateway with `--console` serves stand-in nodes (`bench/_null_node.py`, all in one process)
under a steady load. Each of --watchers clients reads the console's stream, as an open page does.
The benchmark measures without a watcher, with one and with all of them, in turn, and repeats that
--rounds times. The gateway counts the CPU time that its console takes
(`bench/_console_gateway.py`): its other work varies by more than that from one measurement to the
next. One watcher and many of them cost about the same, because the gateway makes and encodes each
message once.

Stand-in nodes change little. So the worst case is measured beside that, in this process and without
sockets: every node and every link changes each second, and 100 requests end.

Prints a table on stderr and JSON on stdout:

\b
  cases     per number of watchers, medians in ms of CPU time per second: `scenes` (making scenes,
            comparing and encoding them), `streams` (sending them), `explanations` (of routes,
            recorded while a console is open), their sum `console` for one message per second,
            and `gateway`, the whole process; messages and bytes per second of one watcher
  worst     ms of CPU to compare two scenes and to encode the message; the bytes of the message
  page      the bytes of the page with all its modules
  verdict   whether all watchers cost less than --goal ms of CPU per second; exit code 1 otherwise
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from _processes import free_ports, process
from prfaas.console.scene import (
    ClusterScene,
    HomeScene,
    LinkScene,
    NodeScene,
    RequestScene,
    Scene,
)
from prfaas.display.console import print_json, run_benchmark
from prfaas.errors import InputError
from prfaas.gateway.console.deltas import delta
from silent_nodes import DEPLOYMENT as TWO_CLUSTERS

HERE = Path(__file__).parent
MODEL = "case-study-1t"
START_S = 120.0
SETTLE_S = 2.0  # after a change of the number of watchers
PROMPT_TOKENS = (150, 600)  # below and above the threshold
PARTS = ("scenes", "streams", "explanations")  # of the console's CPU time
TOKENS, EVENT_S = 8, 0.25  # of an answer: it takes two seconds

# Rarer than by default: polls of so many nodes take most of a core.
DEPLOYMENT = f"""{TWO_CLUSTERS}
[gateway.timeouts]
node_poll_s = 5
kvd_poll_s = 5
"""


# Processes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gateway:
    pid: int
    url: str
    totals: Path  # which `_console_gateway.py` writes

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def spent_s(self) -> dict[str, float]:
        """CPU seconds so far of each part of the console, and of the whole process."""
        spent: dict[str, float] = json.loads(self.totals.read_text())
        return {**{part: spent.get(part, 0.0) for part in PARTS}, "gateway": self.cpu_s()}

    def cpu_s(self) -> float:
        """Of all its threads, in nanoseconds where the kernel counts them."""
        threads = list(Path(f"/proc/{self.pid}/task").iterdir())
        try:
            return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9
        except FileNotFoundError:
            stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=START_S) as page:
            found: bytes = page.read()
            return found


@contextmanager
def started_gateway(folder: Path, nodes: int) -> Iterator[Gateway]:
    """A gateway that has all nodes in use."""
    ports = free_ports(nodes)
    names = [f"n{number:03}" for number in range(nodes)]
    remote = max(1, nodes // 5)
    local = nodes - remote
    prefill = max(1, local // 4)

    def listed(some: Sequence[int]) -> str:
        urls = [f"http://127.0.0.1:{port}" for port in some]
        return ", ".join(f'{{ url = "{url}", kvd_url = "{url}" }}' for url in urls)

    file, log = folder / "deployment.toml", folder / "gateway.log"
    file.write_text(
        DEPLOYMENT.format(
            model=MODEL,
            remote=listed(ports[:remote]),
            remote_gpus=8 * remote,
            local=listed(ports[remote:]),
            local_gpus=8 * local,
            prefill=prefill,
            decode=local - prefill,
        )
    )
    words = [word for port, name in zip(ports, names, strict=True) for word in (str(port), name)]
    pace = ["--tokens", str(TOKENS), "--event-s", str(EVENT_S)]
    stand_ins = [sys.executable, str(HERE / "_null_node.py"), *pace, *words]
    totals = folder / "totals.json"
    script = [sys.executable, str(HERE / "_console_gateway.py"), str(totals)]
    command = [*script, "gateway", str(file), "--console"]
    with process(stand_ins, folder / "nodes.log"):
        wait_for_line(folder / "nodes.log", r"(ready)")
        with process(command, log) as running:
            url = wait_for_line(log, r'"http":\s*"(http://[^"]+)"')
            gateway = Gateway(running.pid, url, totals)
            until_s = time.monotonic() + START_S
            while time.monotonic() < until_s:
                clusters = json.loads(gateway.get("/prfaas/v1/state"))["clusters"]
                if all(node.get("in_use") for cluster in clusters for node in cluster["nodes"]):
                    yield gateway
                    return
                time.sleep(0.2)
            raise InputError(f"the gateway does not use all nodes:\n{log.read_text()[-2000:]}")


def wait_for_line(log: Path, pattern: str) -> str:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        found = re.search(pattern, log.read_text()) if log.is_file() else None
        if found:
            return found[1]
        time.sleep(0.05)
    raise InputError(f"a process does not start:\n{log.read_text()[-2000:]}")


# Load and watchers --------------------------------------------------------------------------------


@dataclass(slots=True)
class Load:
    """Requests at a steady rate, each over its own connection."""

    port: int
    per_s: float
    sent: int = 0
    problems: list[str] = field(default_factory=list)

    async def run(self) -> None:
        rng = np.random.default_rng(1)
        began_s = time.monotonic()
        calls: set[asyncio.Task[None]] = set()
        try:
            for number in itertools.count():
                await asyncio.sleep(max(0.0, began_s + number / self.per_s - time.monotonic()))
                tokens = PROMPT_TOKENS[number % len(PROMPT_TOKENS)]
                prompt = rng.integers(0, 100_000, tokens).tolist()
                call = asyncio.create_task(self._ask(prompt))
                calls.add(call)
                call.add_done_callback(calls.discard)
        finally:
            for call in calls:
                call.cancel()

    async def _ask(self, prompt: list[int]) -> None:
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True})
        self.sent += 1
        answer = b""
        async for part in exchange(self.port, "POST", "/v1/completions", body.encode()):
            answer += part
        if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer:
            self.problems.append(answer[-300:].decode(errors="replace") or "no answer")


async def exchange(port: int, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
    """The answer to one request, as it arrives."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        while part := await reader.read(1 << 16):
            yield part
    finally:
        writer.close()


@dataclass(slots=True)
class Watcher:
    """An open console: it reads the stream and counts."""

    port: int
    messages: int = 0
    nbytes: int = 0
    status: bytes = b""

    async def run(self) -> None:
        async for part in exchange(self.port, "GET", "/console/stream"):
            self.status = self.status or part.partition(b"\r\n")[0]
            self.messages += part.count(b"data: ")
            self.nbytes += len(part)


@asynccontextmanager
async def watched(port: int, count: int) -> AsyncIterator[list[Watcher]]:
    watchers = [Watcher(port) for _ in range(count)]
    tasks = [asyncio.create_task(watcher.run()) for watcher in watchers]
    try:
        yield watchers
        for task, watcher in zip(tasks, watchers, strict=True):
            if task.done():
                raise InputError(f"a stream has ended: {watcher.status!r}, {task.exception()!r}")
            if b" 200 " not in watcher.status + b" ":
                raise InputError(f"a stream has not begun: {watcher.status!r}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Measurements -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    ms_per_s: dict[str, float]  # CPU time of each part of the console, and of the whole gateway
    messages_per_s: float  # of one watcher
    bytes_per_s: float


async def measure(gateway: Gateway, watchers: int, seconds: float) -> Measured:
    async with watched(gateway.port, watchers) as open_consoles:
        await asyncio.sleep(SETTLE_S)
        before = [(one.messages, one.nbytes) for one in open_consoles]
        spent_s, began_s = gateway.spent_s(), time.monotonic()
        await asyncio.sleep(seconds)
        after_s, took_s = gateway.spent_s(), time.monotonic() - began_s
        after = [(one.messages, one.nbytes) for one in open_consoles]
    received = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]
    if watchers and min(messages for messages, _ in received) < 2:
        raise InputError(f"a console received {received} in {took_s:.1f} s; the machine is busy")
    ms_per_s = {part: (after_s[part] - spent_s[part]) / took_s * 1e3 for part in after_s}
    messages = statistics.fmean(one[0] for one in received) if received else 0.0
    nbytes = statistics.fmean(one[1] for one in received) if received else 0.0
    return Measured(ms_per_s, messages / took_s, nbytes / took_s)


async def measure_all(
    gateway: Gateway, cases: Sequence[int], rounds: int, seconds: float, per_s: float
) -> dict[int, list[Measured]]:
    found: dict[int, list[Measured]] = {count: [] for count in cases}
    load = Load(gateway.port, per_s)
    loading = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(2 * SETTLE_S)
        for number in range(rounds):
            # In both orders, so that a slow drift of the machine cancels out.
            for count in cases if number % 2 else reversed(cases):
                found[count].append(await measure(gateway, count, seconds))
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    if load.problems:
        raise InputError(f"{len(load.problems)} of {load.sent} requests failed: {load.problems[0]}")
    return found


def rate_of(measured: Measured) -> float:
    """Messages per second. On a busy machine they are fewer than one, and cost less together."""
    return min(1.0, measured.messages_per_s) or 1.0


def summarise(found: dict[int, list[Measured]]) -> list[dict[str, Any]]:
    rows = []
    for count, measured in found.items():
        parts = {
            part: round(statistics.median(one.ms_per_s[part] for one in measured), 2)
            for part in (*PARTS, "gateway")
        }
        console = [sum(one.ms_per_s[part] for part in PARTS) / rate_of(one) for one in measured]
        rows.append(
            {
                "watchers": count,
                "console": round(statistics.median(console), 2),
                "largest": round(max(console), 2),
                **parts,
                "messages_per_s": round(statistics.median(m.messages_per_s for m in measured), 2),
                "bytes_per_s": round(statistics.median(m.bytes_per_s for m in measured)),
            }
        )
    return rows


def worst_case(nodes: int, repeats: int = 200) -> dict[str, float]:
    """Every node and every link changes, and 100 requests end."""
    rng = np.random.default_rng(2)
    scenes = [made_scene(nodes, number, rng) for number in range(8)]
    requests = [
        RequestScene(f"req-{n:024}", 1.7e9, "pd", "remote", "completed", "least cost now")
        for n in range(100)
    ]
    times_s, nbytes = [], 0
    for before, after in itertools.islice(itertools.pairwise(itertools.cycle(scenes)), repeats):
        began_s = time.process_time()
        change = delta(before, after)
        assert change is not None
        nbytes = len(msgspec.json.encode(msgspec.structs.replace(change, requests=requests)))
        times_s.append(time.process_time() - began_s)
    return {"ms": round(statistics.median(times_s) * 1e3, 2), "bytes": nbytes}


def made_scene(nodes: int, number: int, rng: np.random.Generator) -> Scene:
    def node(name: str) -> NodeScene:
        active, memory = int(rng.integers(48)), int(rng.integers(1 << 34))
        return NodeScene(
            *(f"http://{name}:9000", name, "decode"),
            active=active,
            slots=48,
            wait_s=round(float(rng.random()), 3),
            used_bytes=memory,
            evictable_bytes=memory // 2,
            capacity_bytes=1 << 36,
        )

    halves = {"pd": nodes // 2, "prfaas": nodes - nodes // 2}
    clusters = tuple(
        ClusterScene(name, "pd", tuple(node(f"{name}-{n}") for n in range(count)))
        for name, count in halves.items()
    )
    link = LinkScene("prfaas", "pd", capacity_bps=1e11, rate_bps=float(rng.random() * 1e11))
    home = HomeScene("pd", has_plan=True, local=number, remote=number)
    return Scene(1.7e9 + number, MODEL, "adaptive", clusters, (link,), (home,))


def page_bytes(gateway: Gateway) -> int:
    """Of the page, its modules and its style sheet."""
    page = gateway.get("/")
    assets = {one.decode() for one in re.findall(rb'console/assets/[^"\\?]+', page)}
    return len(page) + sum(len(gateway.get(f"/{one}")) for one in assets)


def show(rows: Sequence[dict[str, Any]]) -> None:
    shown = ("console", "largest", *PARTS, "gateway")
    table = Table("open consoles", *shown, "messages/s", "kB/s", title="CPU time in ms/s")
    for row in rows:
        table.add_row(
            str(row["watchers"]),
            *(f"{row[part]:.1f}" for part in shown),
            f"{row['messages_per_s']:.2f}",
            f"{row['bytes_per_s'] / 1e3:.1f}",
        )
    Console(stderr=True, width=120).print(table)


@click.command(help=__doc__)
@click.option("--nodes", default=200, show_default=True, help="Stand-in nodes.")
@click.option("--watchers", default=10, show_default=True, help="Open consoles.")
@click.option("--rate", default=5.0, show_default=True, help="Requests per second.")
@click.option("--seconds", default=10.0, show_default=True, help="Seconds of each measurement.")
@click.option("--rounds", default=5, show_default=True, help="Measurements of each case.")
@click.option("--goal", default=10.0, show_default=True, help="Allowed ms of CPU per second.")
def main(nodes: int, watchers: int, rate: float, seconds: float, rounds: int, goal: float) -> None:
    with tempfile.TemporaryDirectory(prefix="prfaas-") as name:
        with started_gateway(Path(name), nodes) as gateway:
            page = page_bytes(gateway)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                cases = sorted({0, 1, watchers})
                found = runner.run(measure_all(gateway, cases, rounds, seconds, rate))
    rows = summarise(found)
    show(rows)
    cost = rows[-1]["console"]
    print_json(
        {
            "nodes": nodes,
            "requests_per_s": rate,
            "rounds": rounds,
            "seconds": seconds,
            "cases": rows,
            "worst": worst_case(nodes),
            "page_bytes": page,
            "verdict": {"goal_ms_per_s": goal, "console_ms_per_s": cost, "met": cost < goal},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
    )
    sys.exit(0 if cost < goal else 1)


if __name__ == "__main__":
    run_benchmark(main)
