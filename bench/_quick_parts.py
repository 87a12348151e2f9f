"""The measurements of `bench/quick.py`. Each part yields samples: a figure, and its yardstick just
before. All settings that have a default keep it."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import click
import numpy as np
import uvloop

import gateway
import index
import transport
from _processes import free_ports, process
from _quick_judge import Figure, Sample
from _transport_ends import Case, bench
from _transport_ssl_pair import socket_pair, ssl_pair
from _yardsticks import chain_ms, loop_events_per_s, process_ms
from prfaas.cache.hashing import PromptHashes, block_hashes
from prfaas.config import load_deployment
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import poisson
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import routed_by
from prfaas.transport.link import LinkOptions
from prfaas.transport.workers.pool import default_workers
from prfaas_lab.testing.certificates import make_certificates

_ECHO, _ECHO_TTFT = "requests/s of an HTTP echo", "TTFT of an HTTP echo"
_CHAIN, _LOOP = "a chain of SHA-256", "a loop in Python"


def _figures() -> Iterator[tuple[str, Figure]]:
    for policy in gateway.POLICIES:
        at = f"gateway.{policy}"
        yield f"{at}.first", Figure(f"gateway, `{policy}`: first requests", "requests/s", _ECHO)
        yield f"{at}.rate", Figure(f"gateway, `{policy}`: requests", "requests/s", _ECHO)
        yield f"{at}.added", Figure(f"gateway, `{policy}`: added TTFT", "ms", _ECHO_TTFT)
    yield "index.hash", Figure("block hashes of 32,768 tokens", "ms", _CHAIN)
    yield "index.match", Figure("hash and match of 32,768 tokens", "ms", _CHAIN)
    for policy in gateway.POLICIES:
        yield f"simulator.{policy}", Figure(f"simulator, `{policy}`", "requests/s", _LOOP)
    yield "transfer.checked", Figure("transfer with checksums", "GB/s", "a pair of sockets")
    yield "transfer.tls", Figure("transfer with TLS", "GB/s", "a pair of `ssl` sockets")
    yield "start.help", Figure("`prfaas --help`", "ms", "`python -c pass`")


FIGURES: Mapping[str, Figure] = MappingProxyType(dict(_figures()))


# The gateway --------------------------------------------------------------------------------------

STARTS = 3  # each with gateways that know no speeds yet
ROUNDS = 3  # of each start
SETTLE_S = 10.0  # the longest wait until gateways that have started use little of the cores
TOKENS = 1_000
STREAMS = 32


class Turns(NamedTuple):
    """What a process has had of the cores, and how long it was ready to run and had none."""

    ran_s: float
    delayed_s: float

    def since(self, before: Turns) -> Turns:
        return Turns(self.ran_s - before.ran_s, self.delayed_s - before.delayed_s)


def turns_of(pid: int) -> Turns:
    file = Path(f"/proc/{pid}/schedstat")
    if not file.exists():  # the kernel was built without it
        return Turns(0.0, 0.0)
    ran_ns, delayed_ns, _ = file.read_text().split()
    return Turns(int(ran_ns) / 1e9, int(delayed_ns) / 1e9)


def undisturbed_s(took_s: float, turns: Sequence[Turns]) -> float:
    """How long the processes would have taken, about, had nothing else run on the machine. Delays
    of several processes overlap, but the one that computes longest needs its time."""
    delayed_s = sum(each.delayed_s for each in turns)
    return max(took_s - delayed_s, *(each.ran_s for each in turns))


def measure_gateway() -> Iterator[Sample]:
    """The nodes are much faster than their profile. The first requests show how soon a gateway
    gives the next one to a node that has finished, before it has learned how fast the nodes are."""
    requests = gateway.requests_of(TOKENS)
    for number in range(STARTS):
        policies = [*gateway.POLICIES[number:], *gateway.POLICIES[:number]]
        with tempfile.TemporaryDirectory() as name, _started(Path(name)) as targets:

            def load(target: str, streams: int, seconds: float) -> dict[str, float]:
                pids = {os.getpid(), *targets[target].pids}
                before = [turns_of(pid) for pid in pids]
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    run = runner.run(
                        gateway.load(targets[target].ports, requests, streams, seconds)
                    )
                if run["errors"] or not run["answered"]:
                    raise click.ClickException(f"{target}: {run['errors']} requests failed")
                turns = [turns_of(pid).since(at) for pid, at in zip(pids, before, strict=True)]
                took_s = undisturbed_s(run["answered"] / run["requests_per_s"], turns)
                return {**run, "requests_per_s": run["answered"] / took_s}

            def rate(policy: str, figure: str, seconds: float) -> Sample:
                echo = load("echo", STREAMS, seconds)["requests_per_s"]
                served = load(policy, STREAMS, seconds)["requests_per_s"]
                return Sample(f"gateway.{policy}.{figure}", served, echo)

            _settle([pid for target in targets.values() for pid in target.pids])
            for policy in policies:
                yield rate(policy, "first", 0.4)
            for _ in range(ROUNDS):
                for policy in policies:
                    yield rate(policy, "rate", 0.2)
                    echo_ms = load("echo", 1, 0.2)["ttft_p50_ms"]
                    added_ms = load(policy, 1, 0.2)["ttft_p50_ms"]
                    added_ms -= load("direct", 1, 0.1)["ttft_p50_ms"]
                    yield Sample(f"gateway.{policy}.added", added_ms, echo_ms)


@contextmanager
def _started(folder: Path) -> Iterator[dict[str, gateway.Target]]:
    """The gateways and their nodes, and beside them the echo."""
    (port,) = free_ports(1)
    command = [sys.executable, str(Path(__file__).with_name("_yardsticks.py")), str(port)]
    log = folder / "echo"
    with process(command, log) as echo, gateway.started(folder, gateway.POLICIES, None, 1) as found:
        gateway.ready(port, echo, log, gateway.requests_of(100)[0])
        yield {**found, "echo": gateway.Target([port], [echo.pid])}


def _settle(pids: Sequence[int]) -> None:
    """Waits until the gateways that have just started have made their plans."""
    until_s = time.monotonic() + SETTLE_S
    before_s = sum(map(_runnable_s, pids))
    while time.monotonic() < until_s:
        time.sleep(0.5)
        now_s = sum(map(_runnable_s, pids))
        if now_s - before_s < 0.25:
            return
        before_s = now_s


def _runnable_s(pid: int) -> float:
    """For how long the threads of a process have run or waited for a core."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(sum(map(int, file.read_text().split()[:2])) for file in threads) / 1e9


# The index ----------------------------------------------------------------------------------------


def measure_index() -> Iterator[Sample]:
    manager, prompts, _ = index.build(100_000)
    for tokens in prompts:
        numbers = array("I", tokens)
        data = np.array(tokens, dtype=np.uint32).tobytes()
        yardstick_ms = chain_ms(data, 4 * index.BLOCK_TOKENS)
        began_s = time.perf_counter()
        block_hashes(numbers, index.BLOCK_TOKENS)
        hashed_s = time.perf_counter()
        found = manager.match(PromptHashes(tokens))
        matched_s = time.perf_counter()
        if max(match.attention_tokens for match in found.nodes.values()) != len(tokens):
            raise click.ClickException("the index does not find a stored prompt")
        yield Sample("index.hash", (hashed_s - began_s) * 1e3, yardstick_ms)
        yield Sample("index.match", (matched_s - hashed_s) * 1e3, yardstick_ms)


# The simulator ------------------------------------------------------------------------------------

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
SIMULATED = 500
SIMULATED_LOAD = 0.4  # of the planned capacity, so that no policy has a queue that grows


def measure_simulator() -> Iterator[Sample]:
    deployment = load_deployment(CASE_STUDY)
    problem = Study(CASE_STUDY, "exact").problem(deployment)
    load_rps = SIMULATED_LOAD * find_optimum(problem).capacity_rps
    for seed in range(10):
        arrivals = poisson(problem.workload, load_rps, SIMULATED, seed=seed)
        for policy in gateway.POLICIES:
            config = routed_by(policy, deployment.scheduler, SimConfig(replans=True))
            yardstick = loop_events_per_s()
            began_s = time.process_time()
            simulate(problem, arrivals, config)
            cpu_s = time.process_time() - began_s
            yield Sample(f"simulator.{policy}", SIMULATED / cpu_s, yardstick)


# Transfers ----------------------------------------------------------------------------------------

# So few bytes that many rounds fit: on a busy machine, some of them are not disturbed.
CHECKED_BYTES, TLS_BYTES = 16 << 20, 8 << 20
TRANSFERS = 20


def measure_transfers() -> Iterator[Sample]:
    workers = default_workers()
    count = workers or LinkOptions().connections

    def case(part: str, nbytes: int) -> Case:
        segments = transport.chunk_segments("case-study-1t", nbytes)
        tls = part == "tls"  # which has its own checksums
        return Case(part, "1T hybrid", segments, count, checksums=not tls, tls=tls)

    checked, tls = case("checked", CHECKED_BYTES), case("tls", TLS_BYTES)
    with tempfile.TemporaryDirectory() as name:
        certificates = make_certificates(Path(name))
        with (
            bench(certificates, checked.nbytes, workers) as runner,
            socket_pair(checked.nbytes) as sockets,
            ssl_pair(certificates, tls.nbytes) as secure,
        ):
            for _ in range(TRANSFERS):
                for one, pair in ((checked, sockets), (tls, secure)):
                    bare = max(speed.gigabytes_per_s for speed in pair.run().values())
                    moved = runner.run(one).gigabytes_per_s
                    yield Sample(f"transfer.{one.part}", moved, bare)


# The command --------------------------------------------------------------------------------------


def measure_start() -> Iterator[Sample]:
    for _ in range(10):
        yardstick_ms = process_ms(["-c", "pass"])
        yield Sample("start.help", process_ms(["-m", "prfaas", "--help"]), yardstick_ms)


# The first word of a figure's name is its part.
PARTS: Mapping[str, Callable[[], Iterator[Sample]]] = MappingProxyType(
    {
        "gateway": measure_gateway,
        "index": measure_index,
        "simulator": measure_simulator,
        "transfer": measure_transfers,
        "start": measure_start,
    }
)
