"""The tests of links, listeners and faults once more, with worker processes that move the bytes.

The memory of owners and of most senders lies in one file here, as a kvd's arena does: workers read
and write it themselves. What a test hands to `Transfer.ready` as a plain view, and what the owners
of test_owners.py return, goes through this process. Both ways must give the same results.
"""

from __future__ import annotations

import mmap
import os
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from prfaas.security import tls
from prfaas.security.tls import SERVICE_NAME, TlsContents
from prfaas.transport.buffers import FileSlice
from prfaas.transport.link import LinkOptions, Transfer, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import Manifest
from prfaas.transport.workers.pool import WorkerPool
from prfaas.types import Grant
from prfaas_lab.testing.certificates import make_certificates
from tests.transport import (
    ends,
    test_dead_peers,
    test_faults,
    test_link,
    test_link_tls,
    test_owners,
    test_unproven,
)
from tests.transport.ends import Owner, expect, nothing_leaks, segments
from tests.waiting import PATIENCE_S

WORKERS = 2
ARENA_BYTES = 256 << 20  # the kernel allocates a page at its first use
UNWRITTEN = b"\xee"

# Tests that say nothing about workers, and why:
LEFT_OUT = {
    # They have neither a listener nor a link, or no connection is made.
    "test_grants_and_remembered_results_expire",
    "test_remembered_results_are_bounded",
    "test_the_whole_handshake_of_a_link_has_one_timeout",
    "test_a_manifest_that_no_receiver_takes_is_refused",
    "test_transfer_ids_are_uuids",
    "test_a_port_without_a_listener",
    "test_a_host_that_cannot_be_a_name_fails_the_transfer_with_the_reason",
    "test_a_congestion_control_the_kernel_lacks_is_named",
    # They count how often the kvd's process asks for a context, or advance a clock to end a
    # handshake. Workers make the handshakes with their own contexts and clocks
    # (tests/transport/workers has tests of both).
    "test_new_certificates_count_for_new_connections_and_old_ones_stay",
    "test_the_tls_handshake_counts",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class FileArena:
    """Memory in a file. Allocations are given back all at once."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test-arena")
        os.ftruncate(self.fd, ARENA_BYTES)
        self._whole = memoryview(mmap.mmap(self.fd, ARENA_BYTES))
        self._used = 0

    def allocate(self, nbytes: int) -> FileSlice:
        at, self._used = self._used, self._used + nbytes
        assert self._used <= ARENA_BYTES, "the arena is too small for this test"
        view = self._whole[at : at + nbytes]
        view[:] = UNWRITTEN * nbytes  # what an earlier test left must not pass for a transfer
        return FileSlice(view, self.fd, at)

    def copy_of(self, content: bytes) -> FileSlice:
        made = self.allocate(len(content))
        made.view[:] = content
        return made

    def give_all_back(self) -> None:
        self._used = 0


class FileOwner(Owner):
    """An owner whose memory lies in the arena."""

    def __init__(self, arena: FileArena, *, cut: int = 1 << 30, refuse: str | None = None) -> None:
        super().__init__(cut=cut, refuse=refuse)
        self._arena = arena

    def buffers(self, manifest: Manifest) -> Any:
        if self._refuse is not None:
            return self._refuse
        slices = [self._arena.allocate(segment.nbytes) for segment in manifest.segments]
        names = [segment.name for segment in manifest.segments]
        views: Any = {name: one.view for name, one in zip(names, slices, strict=True)}
        self.memory = views
        return [
            [
                FileSlice(one.view[at : at + self._cut], one.fd, one.offset + at)
                for at in range(0, one.view.nbytes, self._cut)
            ]
            for one in slices
        ]


def send_from_file(
    arena: FileArena,
    link: TransferLink,
    grant: Grant,
    contents: dict[str, bytes],
    *,
    priority: int = 0,
) -> Transfer:
    transfer = link.open(grant, {n: len(c) for n, c in contents.items()}, priority=priority)
    transfer.ready_all({name: [arena.copy_of(content)] for name, content in contents.items()})
    return transfer


class Certificates:
    """Remembers the files of the contexts that tests make. Workers load the files themselves."""

    def __init__(self) -> None:
        self._contents: WeakKeyDictionary[ssl.SSLContext, TlsContents] = WeakKeyDictionary()

    def context(
        self, make: Callable[[Path, Path, Path], ssl.SSLContext], ca: Path, cert: Path, key: Path
    ) -> ssl.SSLContext:
        made = make(ca, cert, key)
        read = [path.read_bytes() for path in (ca, cert, key)]
        self._contents[made] = TlsContents(*read, *read[1:])
        return made

    def of(self, tls: Callable[[], ssl.SSLContext]) -> TlsContents:
        return self._contents[tls()]


class Ends:
    """Makes listeners and links that use workers: a shared pool, or one with certificates."""

    def __init__(self, pool: WorkerPool, certificates: Certificates) -> None:
        self._pool = pool
        self._certificates = certificates

    def listener(self, *args: Any, **more: Any) -> Listener:
        return _closing_pool(Listener, *args, **more, **self._workers(more))

    def link(self, *args: Any, **more: Any) -> TransferLink:
        return _closing_pool(TransferLink, *args, **more, **self._workers(more))

    def _workers(self, more: dict[str, Any]) -> dict[str, Any]:
        tls = more.get("tls")
        if tls is None:
            return {"workers": self._pool}
        contents = self._certificates.of(tls)
        return {"workers": WorkerPool(1, credentials=lambda: contents), "own_pool": True}


def _closing_pool(kind: Any, *args: Any, own_pool: bool = False, **more: Any) -> Any:
    """`close` of the object that is made also closes the pool, where that is its own."""
    made = kind(*args, **more)
    if own_pool:
        close, pool = made.close, more["workers"]

        def close_both() -> None:
            close()
            pool.close()

        made.close = close_both
    return made


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(WORKERS) as made:
        yield made


@pytest.fixture(scope="module")
def arena() -> Iterator[FileArena]:
    made = FileArena()
    yield made
    os.close(made.fd)


@pytest.fixture(autouse=True)
def with_workers(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    pool: WorkerPool,
    arena: FileArena,
) -> Iterator[None]:
    certificates = Certificates()
    made = Ends(pool, certificates)
    replacements = {
        "Listener": made.listener,
        "TransferLink": made.link,
        "Owner": partial(FileOwner, arena),
        "send": partial(send_from_file, arena),
        "server_context": partial(certificates.context, tls.server_context),
        "client_context": partial(certificates.context, tls.client_context),
    }
    modules = [ends, *filter(None, [getattr(request.cls, "module", None)])]
    for module in modules:
        for name, replacement in replacements.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, replacement)
    before = set(pool.pids)
    yield
    arena.give_all_back()
    if request.cls is not None:
        assert set(pool.pids) == before, "no worker has ended"


def repeated(module: ModuleType) -> type:
    """The tests and fixtures of a module as a class of this one."""
    found: dict[str, Any] = {"module": module}
    for name, value in vars(module).items():
        if name in ("clock", "listener", "made"):  # its fixtures
            scope = "class" if name == "made" else "function"
            found[name] = pytest.fixture(scope=scope)(staticmethod(value.__wrapped__))
        elif name.startswith("test_") and name not in LEFT_OUT:
            found[name] = staticmethod(value)
    return type(module.__name__, (), found)


TestFaults = repeated(test_faults)
TestLink = repeated(test_link)
TestLinkTls = repeated(test_link_tls)
TestOwners = repeated(test_owners)
TestUnproven = repeated(test_unproven)
TestDeadPeers = repeated(test_dead_peers)


# Workers that are killed -------------------------------------------------------------------------

PIECES = LinkOptions(connections=3, frame_bytes=64 << 10, quantum_bytes=64 << 10)
TRANSFERS, KILLS, SEGMENT_BYTES = 12, 12, 400_000


@contextmanager
def killing_workers(*pools: WorkerPool) -> Iterator[list[int]]:
    """Kills each worker that the pools have soon after its start, again and again. Yields the ids
    of the killed processes."""
    over, killed = threading.Event(), list[int]()

    def kill() -> None:
        while not over.wait(0.05):
            for pid in {pid for pool in pools for pid in pool.pids}.difference(killed):
                os.kill(pid, signal.SIGKILL)  # once: the id may be another process's later
                killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("encrypted", [False, True])
def test_bytes_arrive_while_workers_are_killed(
    arena: FileArena, tmp_path: Path, encrypted: bool
) -> None:
    """Both sides lose all of their workers several times, in the middle of transfers. The bytes of
    half of the transfers lie in the arena. Without workers the connections run in this process."""
    certificates = make_certificates(tmp_path).identity() if encrypted else None
    contents_of = certificates.contents if certificates else None
    sources = [segments(SEGMENT_BYTES, SEGMENT_BYTES, seed=seed) for seed in range(TRANSFERS)]
    with (
        nothing_leaks(),
        WorkerPool(2, credentials=contents_of) as receiving,
        WorkerPool(2, credentials=contents_of) as sending,
        Listener(workers=receiving, tls=certificates.server if certificates else None) as listener,
        TransferLink(
            listener.address,
            workers=sending,
            tls=certificates.client if certificates else None,
            options=replace(PIECES, tls_name=SERVICE_NAME if certificates else None),
        ) as link,
        killing_workers(receiving, sending) as killed,
    ):
        number = 0
        while number < TRANSFERS or len(killed) < KILLS:
            contents = sources[number % TRANSFERS]
            owner = FileOwner(arena) if number % 2 else Owner()
            grant = expect(listener, contents, owner)
            how = partial(send_from_file, arena) if number % 4 < 2 else ends.send
            how(link, grant, contents).done.result(PATIENCE_S)
            assert owner.wait() is None
            assert owner.memory == contents
            arena.give_all_back()
            number += 1
