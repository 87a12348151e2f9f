"""Transfers whose bytes worker processes move, over real sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from prfaas.config.address import Address
from prfaas.errors import ConnectionLost, TransferFailed
from prfaas.security.tls import SERVICE_NAME, TlsIdentity
from prfaas.transport.grants import transfer_key
from prfaas.transport.link import LinkOptions, Transfer, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import Manifest, ManifestSegment, encode
from prfaas.transport.wire import (
    Kind,
    SegmentPiece,
    auth_of,
    encode_data,
    encode_message,
    parse_sequences,
)
from prfaas.transport.workers.pool import WorkerPool, default_workers
from prfaas.transport.workers.process import WorkerProcess
from prfaas.types import Grant
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from prfaas_lab.testing.certificates import make_certificates
from tests.transport.ends import (
    Owner,
    expect,
    grant_for,
    nothing_leaks,
    on_file,
    segments,
    send,
)
from tests.transport.raw_peer import Raw
from tests.transport.workers.file_owner import FileOwner
from tests.waiting import PATIENCE_S, wait_until

CONTENTS = segments(2_000_000, 1, 70_000, 16_384, 300_000)
OPTIONS = LinkOptions(
    connections=3, frame_bytes=150_000, quantum_bytes=50_000, tls_name=SERVICE_NAME
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    return make_certificates(tmp_path_factory.mktemp("certs")).identity()


@pytest.fixture(scope="module")
def pool(tls: TlsIdentity) -> Iterator[WorkerPool]:
    with WorkerPool(1, credentials=tls.contents) as made:
        yield made


@contextmanager
def ends(
    receivers: WorkerPool | None, senders: WorkerPool | None, tls: TlsIdentity | None
) -> Iterator[tuple[Listener, TransferLink]]:
    """A listener and a link to it."""
    with (
        Listener(tls=tls.server if tls else None, workers=receivers) as listener,
        TransferLink(
            listener.address,
            options=OPTIONS,
            tls=tls.client if tls else None,
            workers=senders,
        ) as link,
    ):
        yield listener, link


def send_files(
    link: TransferLink, grant: Grant, contents: dict[str, bytes], stack: ExitStack
) -> Transfer:
    transfer = link.open(grant, {name: len(content) for name, content in contents.items()})
    transfer.ready_all(stack.enter_context(on_file(contents)))
    return transfer


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("ours", ["both", "receiver", "sender"])
def test_bytes_arrive_as_they_were(
    pool: WorkerPool, tls: TlsIdentity, encrypted: bool, ours: str
) -> None:
    """A process with workers and one without understand each other."""
    receivers = pool if ours in ("both", "receiver") else None
    senders = pool if ours in ("both", "sender") else None
    with nothing_leaks():
        transfer_once(receivers, senders, tls if encrypted else None)


def transfer_once(
    receivers: WorkerPool | None, senders: WorkerPool | None, tls: TlsIdentity | None
) -> None:
    with ExitStack() as stack:
        owner = stack.enter_context(closing(FileOwner(cut=5_000)))
        listener, link = stack.enter_context(ends(receivers, senders, tls))
        transfer = send_files(link, expect(listener, CONTENTS, owner), CONTENTS, stack)
        transfer.done.result(PATIENCE_S)
        assert owner.wait() is None
        assert owner.contents == CONTENTS


@pytest.mark.parametrize("encrypted", [False, True])
def test_memory_that_is_not_in_a_file_takes_the_way_through_this_process(
    pool: WorkerPool, tls: TlsIdentity, encrypted: bool
) -> None:
    owner = Owner(cut=5_000)
    with ends(pool, pool, tls if encrypted else None) as (listener, link):
        send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
    assert owner.wait() is None
    assert owner.memory == CONTENTS


def test_a_worker_drops_the_bytes_of_a_path_check(pool: WorkerPool) -> None:
    body = bytes(3 << 20)
    with Listener(workers=pool) as listener, Raw(listener) as peer:
        for sequence in (1, 2):
            peer.send(encode_message(Kind.MEASURE, body, sequence=sequence))
            answer = peer.answer()
            assert answer.header.kind is Kind.ACK and parse_sequences(answer.body) == (sequence,)


def test_a_frame_of_an_ended_transfer_is_dropped_and_answered(pool: WorkerPool) -> None:
    """Its table of pieces has arrived with its header, since the connection has shown a grant."""
    content = bytes(range(256)) * 400
    contents = {"s0": content}
    grant = grant_for(contents)
    ids = {"transfer_id": transfer_key(grant.transfer_id), "auth": auth_of(grant.token)}
    piece = SegmentPiece(0, 0, 0, len(content), len(content))
    frame = encode_data([piece], [content], sequence=1, checked=True, **ids) + content
    opened = Manifest(1 << 20, (ManifestSegment("s0", len(content)),))
    with closing(FileOwner()) as owner, Listener(workers=pool) as listener, Raw(listener) as peer:
        listener.expect(grant, owner)
        peer.send(encode_message(Kind.OPEN, encode(opened), **ids))
        assert peer.answer().header.kind is Kind.OPENED
        for _ in range(3):
            peer.send(frame)
            assert peer.answer().header.kind is Kind.ENDED
        assert owner.wait() is None and owner.contents == contents


def test_an_unknown_certificate_is_refused(
    pool: WorkerPool, tls: TlsIdentity, tmp_path: Path
) -> None:
    stranger = make_certificates(tmp_path).identity()
    with (
        WorkerPool(1, credentials=stranger.contents) as strangers,
        Listener(tls=tls.server, workers=pool) as listener,
        TransferLink(
            listener.address,
            options=LinkOptions(open_s=2.0, tls_name=SERVICE_NAME),
            tls=stranger.client,
            workers=strangers,
        ) as link,
    ):
        owner = Owner()
        transfer = send(link, expect(listener, CONTENTS, owner), CONTENTS)
        with pytest.raises(TransferFailed, match="certificate|CERTIFICATE"):
            transfer.done.result(PATIENCE_S)
        assert listener.stats().received_bytes == 0


def test_certificates_that_are_read_again_count_for_new_connections(tmp_path: Path) -> None:
    ours = make_certificates(tmp_path).identity()
    with (
        WorkerPool(1, credentials=ours.contents) as workers,
        Listener(tls=ours.server, workers=workers) as listener,
    ):
        for renewed in (False, True):
            if renewed:  # a new CA, which the old certificates are not of
                make_certificates(tmp_path)
                ours.reload()
            with TransferLink(
                listener.address, options=OPTIONS, tls=ours.client, workers=workers
            ) as link:
                owner = Owner()
                grant = expect(listener, CONTENTS, owner)
                send(link, grant, CONTENTS).done.result(PATIENCE_S)
                assert owner.wait() is None


@contextmanager
def slowly(
    listener: Listener, workers: WorkerPool, tls: TlsIdentity
) -> Iterator[tuple[TransferLink, Relay]]:
    relay = Relay(Address("127.0.0.1", 0), Address(*listener.address), Conditions(rate_bps=8e6))
    with (
        closing(relay.start()),
        TransferLink(
            tuple(relay.address), options=OPTIONS, tls=tls.client, workers=workers
        ) as link,
    ):
        yield link, relay


@pytest.mark.parametrize("victim", ["receiver", "sender"])
def test_a_worker_that_is_killed_costs_its_connections_only(tls: TlsIdentity, victim: str) -> None:
    with ExitStack() as stack:
        owner = stack.enter_context(closing(FileOwner()))
        receivers, senders = (
            stack.enter_context(WorkerPool(2, credentials=tls.contents)) for _ in range(2)
        )
        listener = stack.enter_context(Listener(tls=tls.server, workers=receivers))
        link, relay = stack.enter_context(slowly(listener, senders, tls))
        transfer = send_files(link, expect(listener, CONTENTS, owner), CONTENTS, stack)
        wait_until(lambda: transfer.acknowledged_bytes > 0)
        hit = receivers if victim == "receiver" else senders
        pids = hit.pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        relay.change(Conditions())
        transfer.done.result(PATIENCE_S)
        assert owner.wait() is None
        assert owner.contents == CONTENTS
        wait_until(lambda: len(hit.pids) == 2 and not set(hit.pids) & set(pids))
        assert hit.replaced >= 2


def test_a_worker_that_is_stopped_is_killed_and_replaced(tls: TlsIdentity) -> None:
    with ExitStack() as stack:
        owner = stack.enter_context(closing(FileOwner()))
        receivers = stack.enter_context(WorkerPool(1, credentials=tls.contents, answer_s=3.0))
        listener = stack.enter_context(Listener(tls=tls.server, workers=receivers))
        link, relay = stack.enter_context(slowly(listener, receivers, tls))
        transfer = send_files(link, expect(listener, CONTENTS, owner), CONTENTS, stack)
        wait_until(lambda: transfer.acknowledged_bytes > 0)
        pid = stop_worker(receivers)
        relay.change(Conditions())
        transfer.done.result(PATIENCE_S)
        assert owner.contents == CONTENTS
        wait_until(lambda: pid not in receivers.pids)


def stop_worker(pool: WorkerPool) -> int:
    """Stops the pool's only worker. On a busy machine a worker may answer too late, and then the
    pool has just killed it and starts another one."""
    stopped: list[int] = []

    def stop() -> bool:
        with suppress(ProcessLookupError):
            for pid in pool.pids:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        return bool(stopped)

    wait_until(stop)
    return stopped[0]


def test_a_worker_writes_nothing_after_the_owner_got_its_memory_back(tls: TlsIdentity) -> None:
    with ExitStack() as stack:
        owner = stack.enter_context(closing(FileOwner()))
        workers = stack.enter_context(WorkerPool(1, credentials=tls.contents))
        listener = stack.enter_context(Listener(tls=tls.server, workers=workers))
        link, relay = stack.enter_context(slowly(listener, workers, tls))
        grant = expect(listener, CONTENTS, owner)
        transfer = send_files(link, grant, CONTENTS, stack)
        wait_until(lambda: transfer.acknowledged_bytes > 0)
        listener.cancel(grant.transfer_id, "the test has seen enough")
        assert owner.wait() is not None
        owner.fill(b"\x55")
        relay.change(Conditions())
        with pytest.raises(TransferFailed):
            transfer.done.result(PATIENCE_S)
        wait_until(lambda: listener.connections == 0 or not link.busy)
        assert all(set(content) <= {0x55} for content in owner.contents.values())


def test_workers_end_with_their_kvd() -> None:
    program = (
        "import sys, time\n"
        "from prfaas.transport.workers.pool import WorkerPool\n"
        "print(*WorkerPool(2).pids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as kvd:
        assert kvd.stdout is not None
        pids = [int(word) for word in kvd.stdout.readline().split()]
        assert len(pids) == 2 and all(is_running(pid) for pid in pids)
        kvd.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_an_order_that_is_none_ends_the_worker_and_nothing_else() -> None:
    worker = WorkerProcess()
    try:
        worker.ping()
        worker._main.send(b"not an order")
        wait_until(lambda: not worker.alive)
    finally:
        worker.close()


def test_connections_that_are_made_at_the_same_time_use_all_workers() -> None:
    with WorkerPool(3) as several:
        taken = [several.take() for _ in range(6)]
        pids = [worker.pid for worker in taken if worker is not None]
        assert sorted(pids) == sorted(2 * list(several.pids))
        for worker in taken:
            assert worker is not None
            worker.leave()
        assert {worker.connections for worker in taken if worker is not None} == {0}


def test_workers_follow_the_cores() -> None:
    assert [default_workers(cores) for cores in (1, 2, 3, 4, 6, 16, 128)] == [0, 0, 0, 2, 3, 8, 8]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_worker_whose_connection_was_not_made_is_free_again(pool: WorkerPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[:2]
    with TransferLink(closed, workers=pool) as link, pytest.raises(ConnectionLost):
        link.connect(lambda: False)
    worker = pool.take()
    assert worker is not None and worker.connections == 1, "this one only"
    worker.leave()
