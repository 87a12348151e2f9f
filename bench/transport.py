"""The rate at which KV crosses a TCP link between two processes on loopback.

    prfaas bench transport [--rounds 5] [--peers SCRIPT] [--connections 1,2,4,8]

Each run moves about 256 MiB between two regions that no CPU cache holds. The segments are those of
a hand-off: one layer of one 2,048-token chunk, of the paper's 1T hybrid model and of a dense model;
and 40,000 segments of 32 KiB. Rounds interleave our runs with the peers' runs, and the results are
medians. `--peers` runs an external script that prints {name: {"GBps": x}} and accepts
`--only NAME`; it adds `peers` and `ratios` to the result.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prfaas.catalog import Catalog
from prfaas.kvspec import handoff_segments, segment_bytes
from prfaas.security.certificates import CertificateSet, make_certificates
from prfaas.security.tls import client_context, server_context
from prfaas.transport.buffers import FileSlice
from prfaas.transport.grants import new_grant
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import Manifest
from prfaas.types import Grant

TRANSFER_BYTES = 256 << 20
CHUNK_TOKENS = 2_048
SMALL_SEGMENTS, SMALL_BYTES = 40_000, 32 << 10
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    name: str  # of the set of segments
    segments: tuple[int, ...]
    connections: int
    checksums: bool
    tls: bool

    @property
    def nbytes(self) -> int:
        return sum(self.segments)


def chunk_segments(model: str) -> tuple[int, ...]:
    """The sizes of a transfer's segments, each one layer of one chunk."""
    spec = Catalog.builtin().model(model).spec()
    chunks = handoff_segments(spec, 2 * CHUNK_TOKENS, chunk_tokens=CHUNK_TOKENS)
    first = [segment for segment in chunks if segment.stop == CHUNK_TOKENS]
    sizes: list[int] = []
    while sum(sizes) < TRANSFER_BYTES:
        sizes += [segment_bytes(spec, segment) for segment in first]
    while sum(sizes) > TRANSFER_BYTES:
        sizes.pop()
    return tuple(sizes)


def cases(connections: list[int]) -> list[Case]:
    hybrid, dense = chunk_segments("case-study-1t"), chunk_segments("minimax-m2.5")
    found = []
    for count in connections:
        found += [
            Case("1T hybrid", hybrid, count, checksums=False, tls=False),
            Case("1T hybrid", hybrid, count, checksums=True, tls=False),
            Case("dense", dense, count, checksums=True, tls=False),
            Case(
                "1T hybrid", hybrid, count, checksums=False, tls=True
            ),  # TLS has its own checksums
        ]
    small = (SMALL_BYTES,) * SMALL_SEGMENTS
    found += [Case("small", small, count, True, False) for count in connections[:2]]
    return found


# The receiving process ----------------------------------------------------------------------------


class Memory:
    """Receives every transfer into one region, which is larger than any CPU cache."""

    def __init__(self, nbytes: int) -> None:
        self._view = memoryview(touched(nbytes)[0])
        self.over = threading.Event()
        self.failed: str | None = None

    def buffers(self, manifest: Manifest) -> list[list[memoryview]]:
        at, found = 0, []
        for segment in manifest.segments:
            found.append([self._view[at : at + segment.nbytes]])
            at += segment.nbytes
        return found

    def committed(self) -> None:
        self.over.set()

    def ended(self, reason: str) -> None:
        self.failed = reason
        self.over.set()


def touched(nbytes: int) -> tuple[mmap.mmap, int]:
    """Returns a memfd, like a kvd's arena, and its descriptor. All pages are allocated already,
    because the first access to a page costs more than its transfer."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, nbytes)
    region = mmap.mmap(fd, nbytes)
    for at in range(0, nbytes, mmap.PAGESIZE):
        region[at] = 1
    return region, fd


def receive(pipe: Connection, certificates: CertificateSet, nbytes: int) -> None:
    memory = Memory(nbytes)
    context = server_context(certificates.ca, certificates.server, certificates.server_key)
    with Listener() as plain, Listener(tls=lambda: context) as secure:
        pipe.send((plain.address, secure.address))
        while (order := pipe.recv()) is not None:
            grant, tls = order
            memory.over.clear()
            before = cpu_s()
            (secure if tls else plain).expect(grant, memory)
            pipe.send("expected")
            memory.over.wait(TIMEOUT_S)
            assert memory.failed is None, memory.failed
            pipe.send(cpu_s() - before)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# The sending process ------------------------------------------------------------------------------


class Bench:
    def __init__(self, pipe: Connection, certificates: CertificateSet, nbytes: int) -> None:
        self._pipe = pipe
        self._plain, self._secure = pipe.recv()
        self._context = client_context(
            certificates.ca, certificates.client, certificates.client_key
        )
        region, self._fd = touched(nbytes)
        self._source = memoryview(region)

    def run(self, case: Case) -> tuple[float, float]:
        """GB/s from the first ready byte to the commit, and CPU seconds per GB of both ends."""
        options = LinkOptions(connections=case.connections, checksums=case.checksums)
        address = self._secure if case.tls else self._plain
        names = [f"s{i}" for i in range(len(case.segments))]
        with TransferLink(
            address, options=options, tls=(lambda: self._context) if case.tls else None
        ) as link:
            # Connections are long-lived: a first transfer opens their windows, also at the peers.
            segments = dict(zip(names, case.segments, strict=True))
            self._transfer(link, case.tls, segments)
            before = cpu_s()
            took_s, receiver_cpu_s = self._transfer(link, case.tls, segments)
            sender_cpu_s = cpu_s() - before
        gigabytes = case.nbytes / 1e9
        return gigabytes / took_s, (sender_cpu_s + receiver_cpu_s) / gigabytes

    def _transfer(
        self, link: TransferLink, tls: bool, segments: dict[str, int]
    ) -> tuple[float, float]:
        grant: Grant = new_grant("bench", max_bytes=sum(segments.values()), deadline_s=30)
        self._pipe.send((grant, tls))
        assert self._pipe.recv() == "expected"
        views, at = {}, 0
        for name, nbytes in segments.items():
            views[name] = [FileSlice(self._source[at : at + nbytes], self._fd, at)]
            at += nbytes
        transfer = link.open(grant, segments)
        while not transfer.opened:  # like a prefill, which has bytes only some time after the open
            time.sleep(1e-4)
        started = time.perf_counter()
        transfer.ready_all(views)
        transfer.done.result(TIMEOUT_S)
        return time.perf_counter() - started, self._pipe.recv()


@contextmanager
def bench(nbytes: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        certificates = make_certificates(Path(folder))
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(target=receive, args=(far, certificates, nbytes), daemon=True)
        process.start()
        try:
            yield Bench(near, certificates, nbytes)
            near.send(None)
            process.join(TIMEOUT_S)
        finally:
            process.kill()


def peers_once(script: Path) -> dict[str, float | None]:
    ran = subprocess.run(
        [sys.executable, str(script), "--mib", str(TRANSFER_BYTES >> 20), "--reps", "3"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    return {name: result["GBps"] for name, result in json.loads(ran.stdout).items()}


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def report(
    all_cases: list[Case],
    speeds: dict[Case, list[float]],
    costs: dict[Case, list[float]],
    peers: dict[str, list[float]],
) -> dict[str, Any]:
    def best(*, checksums: bool, tls: bool) -> float:
        chosen = [
            median(speeds[case])
            for case in all_cases
            if case.name == "1T hybrid" and (case.checksums, case.tls) == (checksums, tls)
        ]
        return max(chosen)

    runs = [
        {
            "segments": case.name,
            "segment_bytes": max(case.segments),
            "connections": case.connections,
            "checksums": case.checksums,
            "tls": case.tls,
            "GBps": median(speeds[case]),
            "cpu_s_per_GB": median(costs[case]),
        }
        for case in all_cases
    ]
    bare, checked = best(checksums=False, tls=False), best(checksums=True, tls=False)
    secure = best(checksums=False, tls=True)
    small = max(median(speeds[case]) for case in all_cases if case.name == "small")
    result: dict[str, Any] = {
        "transfer_bytes": TRANSFER_BYTES,
        "cores": os.cpu_count(),
        "runs": runs,
        "best": {"bare_GBps": bare, "checked_GBps": checked, "tls_GBps": secure},
        "ratios": {"tls_over_checked": secure / checked, "small_over_large": small / checked},
    }
    if peers:
        result["peers"] = {name: {"GBps": median(values)} for name, values in peers.items()}
        streams = [median(v) for name, v in peers.items() if name.startswith("iperf3")]
        if streams:
            result["ratios"]["bare_over_iperf3"] = bare / max(streams)
            result["ratios"]["checked_over_iperf3"] = checked / max(streams)
        for name, values in peers.items():
            if not name.startswith("iperf3"):
                result["ratios"][f"checked_over_{name}"] = checked / median(values)
    result["ratios"] = {name: round(ratio, 3) for name, ratio in result["ratios"].items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="Runs per case (default 5).")
    parser.add_argument("--connections", default="1,2,4,8", help="Numbers of TCP connections.")
    parser.add_argument(
        "--peers", type=Path, help="Script of another project to run for comparison."
    )
    parser.add_argument("--json", action="store_true", help="No effect: JSON is printed anyway.")
    arguments = parser.parse_args()
    all_cases = cases([int(count) for count in arguments.connections.split(",")])
    speeds: dict[Case, list[float]] = {case: [] for case in all_cases}
    costs: dict[Case, list[float]] = {case: [] for case in all_cases}
    peers: dict[str, list[float]] = {}
    with bench(max(case.nbytes for case in all_cases)) as runner:
        for number in range(arguments.rounds):
            for case in all_cases:
                speed, cost = runner.run(case)
                speeds[case].append(speed)
                costs[case].append(cost)
            if arguments.peers is not None:
                for name, speed_or_none in peers_once(arguments.peers).items():
                    if speed_or_none is not None:
                        peers.setdefault(name, []).append(speed_or_none)
            sys.stderr.write(f"round {number + 1} of {arguments.rounds}\n")
    print(json.dumps(report(all_cases, speeds, costs, peers), indent=2))


if __name__ == "__main__":
    main()
