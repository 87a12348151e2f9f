"""Both ends of a transfer for tests: an owner of memory, and a sender's process."""

from __future__ import annotations

import gc
import mmap
import os
import random
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from prfaas.config.address import Address
from prfaas.transport.buffers import FileSlice
from prfaas.transport.grants import new_grant
from prfaas.transport.link import LinkOptions, Transfer, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import Manifest
from prfaas.types import Grant, LinkStats
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.waiting import PATIENCE_S, wait_until


class Owner:
    """The memory of one transfer, in views of `cut` bytes, and how the transfer ended."""

    def __init__(self, *, cut: int = 1 << 30, refuse: str | None = None) -> None:
        self.memory: dict[str, bytearray] = {}
        self.over = threading.Event()
        self.reason: str | None = None  # None after a commit
        self.calls = 0
        self._cut = cut
        self._refuse = refuse

    def buffers(self, manifest: Manifest) -> list[list[memoryview]] | str:
        if self._refuse is not None:
            return self._refuse
        self.memory = {segment.name: bytearray(segment.nbytes) for segment in manifest.segments}
        return [
            [memoryview(m)[at : at + self._cut] for at in range(0, len(m), self._cut)]
            for m in self.memory.values()
        ]

    def committed(self) -> None:
        self.calls += 1
        self.over.set()

    def ended(self, reason: str) -> None:
        self.calls += 1
        self.reason = reason
        self.over.set()

    def wait(self) -> str | None:
        """Waits for the end. Returns None after a commit, otherwise the reason."""
        assert self.over.wait(PATIENCE_S), "the owner was not notified"
        assert self.calls == 1
        return self.reason


def segments(*sizes: int, seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {f"full0/{i}/0-64": rng.randbytes(size) for i, size in enumerate(sizes)}


def grant_for(contents: dict[str, bytes], *, deadline_s: float = 30.0) -> Grant:
    total = sum(map(len, contents.values()))
    return new_grant("test", max_bytes=total, deadline_s=deadline_s)


def expect(listener: Listener, contents: dict[str, bytes], owner: Owner) -> Grant:
    grant = grant_for(contents)
    listener.expect(grant, owner)
    return grant


def send(
    link: TransferLink, grant: Grant, contents: dict[str, bytes], *, priority: int = 0
) -> Transfer:
    transfer = link.open(grant, {n: len(c) for n, c in contents.items()}, priority=priority)
    transfer.ready_all({name: [memoryview(content)] for name, content in contents.items()})
    return transfer


@contextmanager
def on_file(contents: dict[str, bytes]) -> Iterator[dict[str, list[FileSlice]]]:
    """The contents in a memfd, as in an arena; each segment in two separate slices."""
    total = sum(map(len, contents.values()))
    fd = os.memfd_create("test")
    try:
        size = total + 2 * len(contents) + 1
        os.ftruncate(fd, size)
        region = mmap.mmap(fd, size)
        whole, at, slices = memoryview(region), 0, {}
        for name, content in contents.items():
            half = len(content) // 2
            slices[name] = []
            for part in (content[:half], content[half:]):
                if part:
                    whole[at : at + len(part)] = part
                    slices[name].append(FileSlice(whole[at : at + len(part)], fd, at))
                    at += len(part)
                at += 1
        yield slices
    finally:
        os.close(fd)


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Asserts that the numbers of threads and descriptors are the same after as before."""
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    alive = [thread.name for thread in threading.enumerate()]
    assert threading.active_count() <= threads, alive
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def slow_path_is_measured(
    listener: Listener, options: LinkOptions, tls: Callable[[], ssl.SSLContext] | None = None
) -> None:
    """One frame takes 15 s here. The receiver reports the progress of the frame, and the sender
    reads that while it is still sending."""
    contents = segments(1 << 20)
    relay = Relay(
        Address("127.0.0.1", 0), Address(*listener.address), Conditions(rate_bps=500_000.0)
    )
    with (
        closing(relay.start()),
        TransferLink(tuple(relay.address), options=options, tls=tls) as link,
    ):
        transfer = send(link, expect(listener, contents, Owner()), contents)
        known: list[LinkStats] = []

        def rate_is_known() -> bool:
            stats = link.stats()
            if stats.delivery_bps:
                known.append(stats)
            return bool(known)

        wait_until(rate_is_known)
        assert known[0].waited_s > 0 and known[0].backlog_bytes == 1 << 20
        assert transfer.acknowledged_bytes == 0, "the frame has not arrived yet"
        transfer.abort("seen enough")
