"""The two processes of `bench/transport.py`: one sends and one receives, each with its own
region of memory, which is larger than any CPU cache."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.security.tls import TlsFiles, TlsIdentity, client_context, server_context
from prfaas.transport.buffers import FileSlice
from prfaas.transport.grants import new_grant
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import Manifest
from prfaas.transport.workers.pool import WorkerPool
from prfaas.types import Grant
from prfaas_lab.testing.certificates import CertificateSet

TIMEOUT_S = 120.0
_POOLS: list[WorkerPool] = []  # of this process


@dataclass(frozen=True)
class Case:
    part: str  # what `--only` calls it
    name: str  # of the set of segments
    segments: tuple[int, ...]
    connections: int
    checksums: bool
    tls: bool

    @property
    def nbytes(self) -> int:
        return sum(self.segments)


class Speed(NamedTuple):
    gigabytes_per_s: float
    cpu_s_per_gigabyte: float  # of both processes together


def touched(nbytes: int) -> tuple[mmap.mmap, int]:
    """Returns a memfd, like a kvd's arena, and its descriptor. All pages are allocated already,
    because the first access to a page costs more than its transfer."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, nbytes)
    region = mmap.mmap(fd, nbytes)
    for at in range(0, nbytes, mmap.PAGESIZE):
        region[at] = 1
    return region, fd


@contextmanager
def worker_options(workers: int, certificates: CertificateSet) -> Iterator[dict[str, Any]]:
    """Keyword arguments with which `Listener` and `TransferLink` use that many worker processes."""
    if not workers:
        yield {}
        return
    identity = TlsIdentity(
        TlsFiles(
            certificates.ca,
            certificates.server,
            certificates.server_key,
            certificates.client,
            certificates.client_key,
        )
    )
    with WorkerPool(workers, credentials=identity.contents) as pool:
        _POOLS.append(pool)
        yield {"workers": pool}


# The receiving process ----------------------------------------------------------------------------


class Memory:
    """Receives every transfer into one region, which is larger than any CPU cache."""

    def __init__(self, nbytes: int) -> None:
        region, self._fd = touched(nbytes)
        self._view = memoryview(region)
        self.over = threading.Event()
        self.failed: str | None = None

    def buffers(self, manifest: Manifest) -> list[list[FileSlice]]:
        at, found = 0, []
        for segment in manifest.segments:
            found.append([FileSlice(self._view[at : at + segment.nbytes], self._fd, at)])
            at += segment.nbytes
        return found

    def committed(self) -> None:
        self.over.set()

    def ended(self, reason: str) -> None:
        self.failed = reason
        self.over.set()


def receive(pipe: Connection, certificates: CertificateSet, nbytes: int, workers: int) -> None:
    memory = Memory(nbytes)
    context = server_context(certificates.ca, certificates.server, certificates.server_key)
    with (
        worker_options(workers, certificates) as options,
        Listener(**options) as plain,
        Listener(tls=lambda: context, **options) as secure,
    ):
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
    """Of this process and its workers."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = usage.ru_utime + usage.ru_stime
    for pid in (pid for pool in _POOLS for pid in pool.pids):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


# The sending process ------------------------------------------------------------------------------


class Bench:
    def __init__(
        self,
        pipe: Connection,
        certificates: CertificateSet,
        nbytes: int,
        link_options: dict[str, Any],
    ) -> None:
        self._pipe = pipe
        self._link_options = link_options
        self._plain, self._secure = self._answer()
        self._context = client_context(
            certificates.ca, certificates.client, certificates.client_key
        )
        region, self._fd = touched(nbytes)
        self._source = memoryview(region)

    def run(self, case: Case) -> Speed:
        """From the first ready byte to the commit."""
        options = LinkOptions(connections=case.connections, checksums=case.checksums)
        address = self._secure if case.tls else self._plain
        names = [f"s{i}" for i in range(len(case.segments))]
        with TransferLink(
            address,
            options=options,
            tls=(lambda: self._context) if case.tls else None,
            **self._link_options,
        ) as link:
            # Connections are long-lived: a first transfer opens their windows, also at the peers.
            segments = dict(zip(names, case.segments, strict=True))
            self._transfer(link, case.tls, segments)
            before = cpu_s()
            took_s, receiver_cpu_s = self._transfer(link, case.tls, segments)
            sender_cpu_s = cpu_s() - before
        gigabytes = case.nbytes / 1e9
        return Speed(gigabytes / took_s, (sender_cpu_s + receiver_cpu_s) / gigabytes)

    def _transfer(
        self, link: TransferLink, tls: bool, segments: dict[str, int]
    ) -> tuple[float, float]:
        grant: Grant = new_grant("bench", max_bytes=sum(segments.values()), deadline_s=30)
        self._pipe.send((grant, tls))
        assert self._answer() == "expected"
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
        return time.perf_counter() - started, self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(TIMEOUT_S), "the receiving process does not answer"
        return self._pipe.recv()


@contextmanager
def bench(certificates: CertificateSet, nbytes: int, workers: int = 0) -> Iterator[Bench]:
    """Starts the receiving process. Each end has that many worker processes."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    # Not a daemon process, which could not start workers.
    process = context.Process(target=receive, args=(far, certificates, nbytes, workers))
    process.start()
    try:
        with worker_options(workers, certificates) as options:
            yield Bench(near, certificates, nbytes, options)
            near.send(None)
            process.join(TIMEOUT_S)
    finally:
        process.kill()
