"""Two kvds in succession on one socket path. Lease ids and page numbers may repeat with the second,
so a lease or a ticket of the first must never reach what the second has given to another request.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.errors import ConnectionLost, PeerError, TransferFailed
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import Join
from prfaas.kvspec import FullAttention, Segment
from tests.kvd.hosts import Host, assert_holds, begun, fill, kvd, names, prompt_of
from tests.waiting import wait_until

TOKENS = 40
FIRST, SECOND = prompt_of(TOKENS), prompt_of(TOKENS, seed=1)


@pytest.fixture(autouse=True)
def same_lease_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst case: both kvds number their leases alike. Otherwise they begin at random."""
    monkeypatch.setattr("prfaas.kvd.store.first_lease_id", lambda: 1)


@dataclass
class Restarted:
    """An engine whose kvd was restarted after the request of the prompt FIRST had its lease."""

    host: Host  # the second kvd
    scheduler: KvdClient
    worker: KvdClient
    written: WriteLease  # of the first kvd
    read: ReadLease


@contextmanager
def restarted(folder: Path) -> Iterator[Restarted]:
    with kvd(folder) as host:
        scheduler, worker = host.engine("engine"), host.engine("engine")
        written = begun(scheduler.begin(names(FIRST), TOKENS))
        read = begun(scheduler.pin(names(FIRST)))
    with scheduler, worker, kvd(folder) as host:
        wait_until(lambda: [e["processes"] for e in host.stats()["engines"]] == [2])
        yield Restarted(host, scheduler, worker, written, read)


def test_a_ticket_from_before_a_restart_never_writes_into_another_request(tmp_path: Path) -> None:
    with restarted(tmp_path) as case:
        mine = begun(case.scheduler.begin(names(SECOND), TOKENS))
        assert mine.ticket.lease_id == case.written.ticket.lease_id, "the ids begin anew"
        fill(mine, SECOND)
        with suppress(TransferFailed):
            fill(case.worker.join_write(case.written.ticket), FIRST)
            case.worker.flush()
        mine.commit()
        with begun(case.scheduler.pin(names(SECOND))) as found:
            assert_holds(found, SECOND, TOKENS)
        with pytest.raises(TransferFailed, match="has exited"):
            case.worker.join_write(case.written.ticket)
        assert case.host.in_use() == (0, 0)


def test_a_ticket_from_before_a_restart_never_reads_another_requests_pages(tmp_path: Path) -> None:
    with restarted(tmp_path) as case:
        mine = begun(case.scheduler.begin(names(SECOND), TOKENS))
        fill(mine, SECOND)
        mine.commit()
        held = begun(case.scheduler.pin(names(SECOND)))
        assert held.ticket.lease_id == case.read.ticket.lease_id, "the ids begin anew"
        with pytest.raises(TransferFailed, match="has exited"):
            case.worker.join_read(case.read.ticket)
        held.release()
        assert case.host.in_use() == (0, 0)


def test_a_lease_from_before_a_restart_ends_no_lease_of_another_request(tmp_path: Path) -> None:
    with restarted(tmp_path) as case:
        mine = begun(case.scheduler.begin(names(SECOND), TOKENS))
        fill(mine, SECOND, stop=16)
        fill(case.written, FIRST)  # into the first arena, which is still mapped
        with pytest.raises(ConnectionLost):
            case.written.commit()
        case.written.abort("again")
        case.read.release()
        assert case.host.in_use()[1] == 1, "the lease of the second request lives"
        fill(mine, SECOND)
        mine.commit()
        with begun(case.scheduler.pin(names(SECOND))) as found:
            assert_holds(found, SECOND, TOKENS)


def test_the_kvd_itself_refuses_a_join_that_names_another_instance(tmp_path: Path) -> None:
    with kvd(tmp_path) as host, host.engine() as owner, host.engine() as worker:
        lease = begun(owner.begin(names(FIRST), TOKENS))
        connection = worker._connected()
        for instance in ("", "another"):
            with pytest.raises(PeerError, match="another instance"):
                connection.call(Join(lease.ticket.lease_id, instance))
        connection.call(Join(lease.ticket.lease_id, lease.ticket.instance))
        assert lease.ticket.instance == owner.registered.instance == host.stats()["instance"]


def test_an_engine_is_told_of_every_mapping(tmp_path: Path) -> None:
    told: list[mmap.mmap] = []
    with kvd(tmp_path) as host:
        client = host.engine("engine")
        client.watch_memory(told.append)
        lease = begun(client.begin(names(FIRST), TOKENS))
        (first,) = told
        assert all(view.obj is first for view in lease.buffers(_some_segment(client, lease)))
    with client, kvd(tmp_path):
        wait_until(lambda: len(told) == 2)
        lease = begun(client.begin(names(FIRST), TOKENS))
        assert told[1] is not first
        assert lease.mapped_buffers(_some_segment(client, lease)).memory is told[1]
        assert len(first) == len(told[1])  # the old one stays mapped for its views


def _some_segment(client: KvdClient, lease: WriteLease) -> Segment:
    group = next(group for group in client.spec.groups if isinstance(group, FullAttention))
    return Segment(group.name, group.layers[0], 0, lease.tokens)
