"""The time that the gateway adds to a request, per routing policy and beside vLLM's router.

\b
    python -m prfaas_lab bench gateway [--policy adaptive,paper] [--router ~/router/bin/vllm-router]

The nodes answer at once (`bench/_null_node.py`), so the measured time is the gateway's: reading the
prompt, hashing, routing, grant, prefill, commit, decode and relaying 8 tokens. A policy that holds
requests for nodes that are idle shows here, because these nodes are much faster than their profile.
Each stream sends a prompt of token ids after the previous answer has ended. All targets run beside
each other and are measured in turn within each round, so that a machine that becomes slower slows
all of them. Results are medians of the rounds, ratios those of the ratios within a round. Prints
JSON:

\b
  cases          per prompt length and number of streams, for `direct` (the node, no gateway), each
                 policy (one gateway), `gateways` (several, of the first policy) and `router`:
                 requests/s, TTFT p50 and p99, CPU time per request, errors; `added_ttft_ms` is
                 TTFT minus `direct`'s; `rate_of_paper` and `rate_of_router` are each policy's
                 requests/s over those of policy `paper` and of the router; `rate_of_one` is the
                 requests/s of several gateways over those of one
  loop_stall_ms  p99 of each gateway's event-loop lag
  tokenising_ms  byte-level tokenisation of texts of these lengths; measured separately, because
                 prompts of token ids need none
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import click
import numpy as np
import uvloop

from _processes import free_ports, process
from prfaas.config.deployment import SchedulerSection
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.text import load_tokenizer

HERE = Path(__file__).parent
MODEL = "case-study-1t"
LENGTHS = (1_000, 30_000, 128_000)
STREAMS = (1, 32, 256)
PROMPTS = 8  # different prompts, sent in turn
VOCABULARY = 160_000
START_S = 60.0
NODES = ("remote", "prefill", "decode")
POLICIES = get_args(get_type_hints(SchedulerSection)["policy"])
BASIS = "paper"  # the policy that the others are compared with: it never holds a request
_END = b"\r\n0\r\n\r\n"  # the end of a chunked body

DEPLOYMENT = """
[model]
name = "{model}"
[workload]
kind = "lognormal"
mu = 9.90
sigma = 1.00
min_tokens = 128
max_tokens = 131072
output_tokens = 1024
[slo]
output_tokens_per_s = 40
[[clusters]]
name = "prfaas"
kind = "prfaas"
accelerator = "h200"
gpus = 8
gpus_per_instance = 8
nodes = [{{ url = "{remote}", kvd_url = "{remote}" }}]
[[clusters]]
name = "pd"
kind = "pd"
accelerator = "h20"
gpus = 16
gpus_per_instance = 8
prefill = 1
decode = 1
nodes = [
  {{ url = "{prefill}", kvd_url = "{prefill}" }},
  {{ url = "{decode}", kvd_url = "{decode}" }},
]
[[links]]
from = "prfaas"
to = "pd"
gbps = 100
rtt_ms = 0
[gateway]
port = {port}
plans = {plans}
max_bodies_mb = 4096
[gateway.timeouts]
leave_s = 0
"""
POLICY = """
[scheduler]
policy = "{policy}"
"""


# The load ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    ttft_s: list[float] = field(default_factory=list)
    answered: int = 0
    errors: int = 0
    problem: str = ""  # the first error


class Stream(asyncio.Protocol):
    """Sends requests until `until_s`, each after the end of the previous answer."""

    def __init__(self, requests: Sequence[bytes], until_s: float, seen: Seen) -> None:
        self._requests = requests
        self._until_s = until_s
        self._seen = seen
        self._number = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        if time.perf_counter() >= self._until_s:
            self._transport.close()
            return
        self._begun_s = time.perf_counter()
        self._answer = b""
        self._first = True
        self._transport.write(self._requests[self._number % len(self._requests)])
        self._number += 1

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._first and b"data:" in self._answer:
            self._first = False
            self._seen.ttft_s.append(time.perf_counter() - self._begun_s)
        if not self._answer.startswith(b"HTTP/1.1 200"):
            self._failed()
            self._transport.close()
        elif self._answer.endswith(_END):
            if b"[DONE]" in self._answer:
                self._seen.answered += 1
            else:
                self._failed()
            self._send()

    def _failed(self) -> None:
        self._seen.errors += 1
        self._seen.problem = self._seen.problem or self._answer.decode(errors="replace")

    def give_up(self) -> None:
        """Counts the request that is not answered yet as an error."""
        if not self.ended.done():
            self._answer = self._answer or b"no answer"
            self._failed()
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def load(
    ports: Sequence[int], requests: Sequence[bytes], streams: int, seconds: float
) -> dict[str, Any]:
    """Runs all streams and distributes them over `ports` in turn."""
    loop = asyncio.get_running_loop()
    seen = Seen()
    begun_s = time.perf_counter()
    running = []
    for number in range(streams):
        turned = [*requests[number % PROMPTS :], *requests[: number % PROMPTS]]

        def stream(turned: Sequence[bytes] = turned) -> Stream:
            return Stream(turned, begun_s + seconds, seen)

        port = ports[number % len(ports)]
        running.append((await loop.create_connection(stream, "127.0.0.1", port))[1])
    await asyncio.wait([one.ended for one in running], timeout=seconds + START_S)
    for one in running:
        one.give_up()
    wall_s = time.perf_counter() - begun_s
    if seen.problem:
        click.echo(f"{seen.errors} errors, the first: {seen.problem}", err=True)
    times = np.array(seen.ttft_s or [float("nan")]) * 1e3
    return {
        "answered": seen.answered,
        "requests_per_s": seen.answered / wall_s,
        "ttft_p50_ms": float(np.quantile(times, 0.5)),
        "ttft_p99_ms": float(np.quantile(times, 0.99)),
        "errors": seen.errors,
    }


def requests_of(tokens: int) -> list[bytes]:
    """Encodes the requests. Every target receives the same prompts."""
    rng = np.random.default_rng(tokens)
    made = []
    for _ in range(PROMPTS):
        prompt = rng.integers(0, VOCABULARY, tokens).tolist()
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": True}
        body = json.dumps(asked, separators=(",", ":")).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


# Measurements -----------------------------------------------------------------------------------


def ready(port: int, child: subprocess.Popen[bytes], log: Path, request: bytes | None) -> None:
    """Waits until the process answers `request`, or its health check when there is no request."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and child.poll() is None:
        try:
            if request is None:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                return
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(request)
                if connection.recv(65536).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise click.ClickException(f"process {child.pid} does not answer:\n{log.read_text()[-2000:]}")


def stalls(port: int) -> dict[float, float]:
    """Event-loop lag of the gateway: bound in ms -> cumulative count of its samples."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    found = re.findall(r'prfaas_gateway_loop_lag_seconds_bucket{le="([^"]+)"} (\S+)', text)
    return {float(bound) * 1e3: float(count) for bound, count in found}


def stall_p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    looks = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    total = max(looks.values())
    return min(bound for bound, count in looks.items() if count >= 0.99 * total)


def tokenising_ms(folder: Path) -> dict[str, float]:
    make_checkpoint(folder / "model", "qwen3", "tiny", seed=0)
    words = load_tokenizer(folder / "model")
    found = {}
    for length in LENGTHS:
        text = ("the quick brown fox jumps over the lazy dog " * (length // 40 + 1))[:length]
        times = []
        for _ in range(5):
            begun_s = time.perf_counter()
            words.encode(text)
            times.append(time.perf_counter() - begun_s)
        found[str(length)] = round(statistics.median(times) * 1e3, 2)
    return found


@dataclass(frozen=True, slots=True)
class Target:
    ports: Sequence[int]
    pids: Sequence[int] = ()

    def cpu_s(self) -> float:
        """CPU time of all processes of the target so far."""
        stats = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.pids
        ]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


@click.command(help=__doc__)
@click.option(
    "--policy",
    "named",
    multiple=True,
    default=(SchedulerSection().policy, BASIS),
    show_default=True,
    help="Routing policy; repeatable, or several with commas.",
)
@click.option("--router", help="Path of vLLM's router, to compare with.")
@click.option(
    "--gateways",
    default=2,
    show_default=True,
    help="Number of gateways of the first policy to compare with one.",
)
@click.option("--seconds", default=3.0, show_default=True, help="Seconds of each measurement.")
@click.option("--rounds", default=3, show_default=True, help="Measurements per case and target.")
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=int,
    default=LENGTHS,
    show_default=True,
    help="Tokens per prompt; repeatable.",
)
@click.option(
    "--streams",
    multiple=True,
    type=int,
    default=STREAMS,
    show_default=True,
    help="Requests in flight; repeatable.",
)
def main(
    named: tuple[str, ...],
    router: str | None,
    gateways: int,
    seconds: float,
    rounds: int,
    lengths: tuple[int, ...],
    streams: tuple[int, ...],
) -> None:
    policies = _policies(named)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(folder, policies, router, gateways) as targets:
            found = _cases(targets, policies, seconds, rounds, lengths, streams)
        results = {
            "rounds": rounds,
            "seconds": seconds,
            "cores": os.cpu_count(),
            "cases": found,
            "tokenising_ms": tokenising_ms(folder),
        }
    print(json.dumps(results, indent=2))


def _policies(named: Sequence[str]) -> list[str]:
    policies = list(dict.fromkeys(one.strip() for words in named for one in words.split(",")))
    for policy in policies:
        if policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise click.BadParameter(f"{policy!r} is not one of {known}", param_hint="--policy")
    return policies


@contextmanager
def started(
    folder: Path, policies: Sequence[str], router: str | None, gateways: int
) -> Iterator[dict[str, Target]]:
    """Starts the null nodes, the gateways and the router, and waits until they are ready.

    Each policy has nodes of its own, in one process, so that every gateway plans for its nodes.
    """
    sets = {policy: dict(zip(NODES, free_ports(len(NODES)), strict=True)) for policy in policies}
    pairs = [word for nodes in sets.values() for name, at in nodes.items() for word in (at, name)]
    urls = {
        policy: {name: f"http://127.0.0.1:{at}" for name, at in nodes.items()}
        for policy, nodes in sets.items()
    }
    nodes, own = sets[policies[0]], urls[policies[0]]
    small = requests_of(100)[0]

    with ExitStack() as stack:
        awaited: list[Callable[[], None]] = []

        def start(name: str, command: Sequence[str], port: int, request: bytes | None) -> int:
            log = folder / name
            child = stack.enter_context(process(command, log))
            awaited.append(partial(ready, port, child, log, request))
            return child.pid

        def start_gateway(name: str, policy: str, port: int, plans: str) -> int:
            text = DEPLOYMENT.format(model=MODEL, port=port, plans=plans, **urls[policy])
            file = folder / f"{name}.toml"
            file.write_text(text + POLICY.format(policy=policy))
            command = [sys.executable, "-m", "prfaas", "gateway", str(file), "--log-level", "error"]
            return start(name, command, port, small)

        null = [sys.executable, str(HERE / "_null_node.py"), *map(str, pairs)]
        start("null", null, nodes["decode"], None)
        targets = {"direct": Target([nodes["decode"]])}
        for policy, port in zip(policies, free_ports(len(policies)), strict=True):
            targets[policy] = Target([port], [start_gateway(policy, policy, port, "true")])
        if gateways > 1:
            first, others = targets[policies[0]], free_ports(gateways - 1)
            pids = [
                start_gateway(f"gateway-{number}", policies[0], port, "false")
                for number, port in enumerate(others)
            ]
            targets["gateways"] = Target([*first.ports, *others], [*first.pids, *pids])
        if router is not None:
            port, metrics_port = free_ports(2)
            command = [
                *(os.path.expanduser(router), "--host", "127.0.0.1"),
                *("--port", str(port), "--vllm-pd-disaggregation"),
                *("--prefill", own["prefill"], "--decode", own["decode"]),
                *("--log-level", "error", "--prometheus-port", str(metrics_port)),
            ]
            targets["router"] = Target([port], [start("router", command, port, small)])
        for is_ready in awaited:  # they start beside each other
            is_ready()
        yield targets


def _cases(
    targets: dict[str, Target],
    policies: Sequence[str],
    seconds: float,
    rounds: int,
    lengths: Sequence[int],
    streams: Sequence[int],
) -> list[dict[str, Any]]:
    cases = []
    for length in lengths:
        requests = requests_of(length)
        for count in streams:
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
            before = {policy: stalls(targets[policy].ports[0]) for policy in policies}
            for number in range(rounds):
                names = list(targets) if number % 2 else list(reversed(targets))
                for name in names:
                    target = targets[name]
                    cpu_s = target.cpu_s()
                    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                        run = runner.run(load(target.ports, requests, count, seconds))
                    cpu_ms = (target.cpu_s() - cpu_s) * 1e3
                    run["cpu_ms_per_request"] = cpu_ms / max(1, run["answered"])
                    runs[name].append(run)
            case = {"prompt_tokens": length, "streams": count, **_summary(runs, policies)}
            case["loop_stall_ms"] = {
                policy: stall_p99_ms(before[policy], stalls(targets[policy].ports[0]))
                for policy in policies
            }
            click.echo(json.dumps(case), err=True)
            cases.append(case)
    return cases


def _summary(runs: dict[str, list[dict[str, Any]]], policies: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {key: round(statistics.median(run[key] for run in many), 3) for key in many[0]}
        for name, many in runs.items()
    }
    direct = found["direct"]
    for name in [name for name in found if name != "direct"]:
        found[name]["added_ttft_ms"] = {
            key: round(found[name][f"ttft_{key}_ms"] - direct[f"ttft_{key}_ms"], 3)
            for key in ("p50", "p99")
        }
    for basis in (BASIS, "router"):
        others = [policy for policy in policies if policy != basis]
        if basis in runs and others:
            found[f"rate_of_{basis}"] = {
                policy: _rate_of(runs[policy], runs[basis]) for policy in others
            }
    if "gateways" in runs:
        found["rate_of_one"] = _rate_of(runs["gateways"], runs[policies[0]])
    return found


def _rate_of(some: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> float:
    ratios = [
        float(one["requests_per_s"] / max(other["requests_per_s"], 1e-9))
        for one, other in zip(some, others, strict=True)
    ]
    return round(statistics.median(ratios), 3)


if __name__ == "__main__":
    main()
