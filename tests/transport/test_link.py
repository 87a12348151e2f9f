"""Link and listener over real sockets: bytes arrive, whole and unchanged, and are paid for once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from prfaas.config.address import Address
from prfaas.errors import InputError, TransferFailed
from prfaas.transport.grants import new_grant
from prfaas.transport.link import PREFIX_COPY, ConnectionBudget, LinkOptions, TransferLink
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.transport.ends import (
    Owner,
    expect,
    grant_for,
    nothing_leaks,
    on_file,
    segments,
    send,
    slow_path_is_measured,
)
from tests.waiting import PATIENCE_S, wait_until

SMALL = LinkOptions(connections=3, frame_bytes=64 << 10, quantum_bytes=16 << 10)


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("cut", [1 << 30, 5000])
def test_bytes_arrive_as_they_were(connections: int, checksums: bool, cut: int) -> None:
    contents = segments(1, 5_000_000, 16384, 16385, 3, 1_000_000, 100)
    owner = Owner(cut=cut)
    options = LinkOptions(
        connections=connections, checksums=checksums, frame_bytes=200_000, quantum_bytes=65536
    )
    with nothing_leaks():
        with Listener() as listener, TransferLink(listener.address, options=options) as link:
            transfer = send(link, expect(listener, contents, owner), contents)
            transfer.done.result(PATIENCE_S)
            assert owner.wait() is None
            assert owner.memory == contents
            stats = listener.stats()
            assert stats.received_bytes == sum(map(len, contents.values()))
            assert (stats.granted, stats.committed, stats.duplicate_bytes) == (0, 1, 0)
            assert transfer.acknowledged_bytes == stats.received_bytes


@pytest.mark.parametrize("checksums", [True, False])
def test_bytes_of_an_arena_arrive_as_they_were(checksums: bool) -> None:
    contents = segments(1, 2_000_000, 16384, 40_000, 3)
    owner = Owner()
    options = LinkOptions(
        connections=3, checksums=checksums, frame_bytes=200_000, quantum_bytes=65536
    )
    with Listener() as listener, TransferLink(listener.address, options=options) as link:
        with on_file(contents) as slices:
            sizes = {name: len(content) for name, content in contents.items()}
            transfer = link.open(expect(listener, contents, owner), sizes)
            transfer.ready_all(slices)
            transfer.done.result(PATIENCE_S)
        assert owner.wait() is None
        assert owner.memory == contents


def test_segments_leave_as_they_become_ready_in_any_order() -> None:
    contents = segments(*[50_000] * 20)
    owner = Owner()
    with Listener() as listener, TransferLink(listener.address, options=SMALL) as link:
        transfer = link.open(expect(listener, contents, owner), dict.fromkeys(contents, 50000))
        for name in reversed(list(contents)[1:]):
            transfer.ready(name, memoryview(contents[name])[:7], memoryview(contents[name])[7:])
        missing = next(iter(contents))
        wait_until(lambda: transfer.acknowledged_bytes == 19 * 50_000)
        assert transfer.opened
        assert not owner.over.is_set()
        assert not transfer.done.done()
        transfer.ready(missing, memoryview(contents[missing]))
        transfer.done.result(PATIENCE_S)
        assert owner.memory == contents


def test_many_transfers_share_the_connections() -> None:
    jobs = [(segments(*[30_000] * 10, seed=seed), Owner()) for seed in range(20)]
    with Listener() as listener, TransferLink(listener.address, options=SMALL) as link:
        transfers = [
            send(link, expect(listener, contents, owner), contents, priority=index % 2)
            for index, (contents, owner) in enumerate(jobs)
        ]
        for transfer, (contents, owner) in zip(transfers, jobs, strict=True):
            transfer.done.result(PATIENCE_S)
            assert owner.memory == contents
        assert listener.connections <= 3


def test_forty_thousand_small_segments() -> None:
    contents = segments(*[512] * 40_000)
    owner = Owner()
    # So long a manifest keeps a busy machine occupied for a while on both sides.
    receiving = ListenerOptions(silence_s=PATIENCE_S, unproven_s=PATIENCE_S)
    sending = LinkOptions(open_s=PATIENCE_S, silence_s=PATIENCE_S, stall_s=PATIENCE_S)
    with (
        Listener(options=receiving) as listener,
        TransferLink(listener.address, options=sending) as link,
    ):
        send(link, expect(listener, contents, owner), contents).done.result(PATIENCE_S)
        assert owner.memory == contents


def test_a_hand_off_overtakes_a_prefix_copy() -> None:
    """With one frame in flight, an urgent transfer waits for one frame, not for the queue."""
    bulk, urgent = segments(4_000_000), segments(10_000, seed=1)
    order: list[str] = []
    options = LinkOptions(
        connections=1, frame_bytes=16 << 10, quantum_bytes=16 << 10, in_flight_bytes=1
    )
    with (
        Listener() as listener,
        Relay(Address("127.0.0.1", 0), Address(*listener.address), Conditions()) as relay,
        TransferLink(relay.address, options=options) as link,
    ):
        relay.stall()  # nothing moves until both transfers are queued
        slow = send(link, expect(listener, bulk, Owner()), bulk, priority=PREFIX_COPY)
        fast = send(link, expect(listener, urgent, Owner()), urgent)
        slow.done.add_done_callback(lambda _: order.append("prefix copy"))
        fast.done.add_done_callback(lambda _: order.append("hand-off"))
        relay.restore()
        slow.done.result(PATIENCE_S)
        fast.done.result(PATIENCE_S)
    assert order == ["hand-off", "prefix copy"]


async def test_asyncio_can_wait_for_it() -> None:
    contents = segments(100_000)
    with Listener() as listener, TransferLink(listener.address) as link:
        sent = send(link, expect(listener, contents, Owner()), contents)
        await asyncio.wait_for(asyncio.wrap_future(sent.done), PATIENCE_S)


def test_the_budget_is_shared_and_the_first_connection_is_free() -> None:
    budget = ConnectionBudget(extra=2)
    options = LinkOptions(connections=4)
    contents = segments(1000)
    with Listener() as a, Listener() as b:
        with (
            TransferLink(a.address, options=options, budget=budget) as one,
            TransferLink(b.address, options=options, budget=budget) as two,
        ):
            # Transfers that wait for their bytes: a link without transfers opens no connections.
            sizes = dict.fromkeys(contents, 1000)
            first = one.open(expect(a, contents, Owner()), sizes)
            wait_until(lambda: one.stats().connections == 3)
            second = two.open(expect(b, contents, Owner()), sizes)
            wait_until(lambda: second.opened)
            assert (one.stats().connections, two.stats().connections) == (3, 1)
            for transfer in (first, second):
                transfer.ready_all({name: [memoryview(c)] for name, c in contents.items()})
                transfer.done.result(PATIENCE_S)
        assert budget.take() and budget.take() and not budget.take()  # all given back


def test_stats_tell_what_has_happened() -> None:
    contents = segments(3_000_000)
    with Listener() as listener, TransferLink(listener.address, options=SMALL) as link:
        assert link.stats().goodput_bps == 0
        send(link, expect(listener, contents, Owner()), contents).done.result(PATIENCE_S)
        stats = link.stats()
        assert stats.goodput_bps > 0
        assert (stats.backlog_bytes, stats.in_flight_bytes, stats.waited_s) == (0, 0, 0)
        assert stats.rtt_s is not None and stats.rtt_s > 0
        # Mostly none, but on a busy machine the kernel probes, and sends what was not lost again.
        assert stats.retransmitted_segments is not None
        assert stats.congestion_window_bytes is not None and stats.congestion_window_bytes > 0
        assert link.stats().goodput_bps == 0  # nothing since


def test_a_slow_path_is_measured_before_a_frame_has_arrived() -> None:
    with Listener() as listener:
        slow_path_is_measured(listener, LinkOptions(connections=1))


def test_a_grant_is_used_once_and_within_its_bytes() -> None:
    contents = segments(1000)
    with Listener() as listener, TransferLink(listener.address) as link:
        grant = expect(listener, contents, Owner())
        with pytest.raises(InputError, match="announced before"):
            listener.expect(grant, Owner())
        with pytest.raises(InputError, match="2000 bytes, but the grant allows 1000"):
            link.open(grant, {"a": 2000})
        send(link, grant, contents).done.result(PATIENCE_S)
        with pytest.raises(InputError, match="announced before"):
            listener.expect(grant, Owner())


def test_the_owner_may_refuse_and_either_side_may_give_up() -> None:
    contents = segments(1000)
    with Listener() as listener, TransferLink(listener.address) as link:
        owner = Owner(refuse="the arena is full")
        refused = send(link, expect(listener, contents, owner), contents)
        with pytest.raises(TransferFailed, match="refused: the arena is full"):
            refused.done.result(PATIENCE_S)
        assert owner.wait() == "refused: the arena is full"

        owner = Owner()
        aborted = link.open(expect(listener, contents, owner), dict.fromkeys(contents, 1000))
        aborted.abort("client went away")
        with pytest.raises(TransferFailed, match="client went away"):
            aborted.done.result(PATIENCE_S)
        assert owner.wait() == "aborted by the sender: client went away"

        owner = Owner()
        options = LinkOptions(probe_s=0.05)
        with TransferLink(listener.address, options=options) as probing:
            grant = expect(listener, contents, owner)
            cancelled = probing.open(grant, dict.fromkeys(contents, 1000))
            listener.cancel(grant.transfer_id, "no room")
            with pytest.raises(TransferFailed, match="no room"):
                cancelled.done.result(PATIENCE_S)
            assert owner.wait() == "no room"
        assert listener.stats().granted == 0


def test_closing_either_end_ends_transfers() -> None:
    contents = segments(1000)
    owner = Owner()
    with nothing_leaks():
        listener = Listener()
        link = TransferLink(listener.address)
        transfer = link.open(expect(listener, contents, owner), dict.fromkeys(contents, 1000))
        link.close()
        link.close()
        with pytest.raises(TransferFailed, match="link closed"):
            transfer.done.result(PATIENCE_S)
        listener.close()
        listener.close()
        assert owner.wait() is not None
        with pytest.raises(InputError, match="closed"):
            link.open(grant_for(contents), {"a": 1})


def test_a_link_without_work_keeps_no_connection() -> None:
    contents = segments(1000)
    options = LinkOptions(connections=2, idle_s=0.2)
    with Listener() as listener, TransferLink(listener.address, options=options) as link:
        send(link, expect(listener, contents, Owner()), contents).done.result(PATIENCE_S)
        wait_until(lambda: link.stats().connections == 0)
        # and makes a new one when there is work again
        send(link, expect(listener, contents, Owner()), contents).done.result(PATIENCE_S)


def test_a_congestion_control_the_kernel_lacks_is_named() -> None:
    options = LinkOptions(congestion_control="carrier-pigeon", open_s=1)
    contents = segments(10)
    with Listener() as listener, TransferLink(listener.address, options=options) as link:
        transfer = send(link, expect(listener, contents, Owner()), contents)
        with pytest.raises(TransferFailed, match="congestion control 'carrier-pigeon'"):
            transfer.done.result(PATIENCE_S)


def test_a_transfer_cannot_be_opened_while_it_is_under_way() -> None:
    contents, owner = segments(1000), Owner()
    with Listener() as listener, TransferLink(listener.address) as link:
        grant = expect(listener, contents, owner)
        transfer = link.open(grant, dict.fromkeys(contents, 1000))
        with pytest.raises(InputError, match=r"grant.transfer_id: transfer .* is under way"):
            link.open(grant, dict.fromkeys(contents, 1000))
        for name, content in contents.items():
            transfer.ready(name, memoryview(content))
        transfer.done.result(PATIENCE_S)
        assert owner.memory == contents


def test_a_host_that_cannot_be_a_name_fails_the_transfer_with_the_reason() -> None:
    contents = segments(10)
    with nothing_leaks(), TransferLink(("x" * 70, 1), options=LinkOptions(open_s=1)) as link:
        transfer = send(link, grant_for(contents), contents)
        with pytest.raises(TransferFailed, match="is not a host name"):
            transfer.done.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("sizes", "label", "problem"),
    [
        ({}, b"", "has 0 segments"),
        ({"a": 0}, b"", "a: the segment has 0 bytes"),
        ({"a" * 201: 1}, b"", "name has 201 characters"),
        ({"a": 1}, bytes(65), "label: the label has 65 bytes"),
    ],
)
def test_a_manifest_that_no_receiver_takes_is_refused(
    sizes: dict[str, int], label: bytes, problem: str
) -> None:
    with nothing_leaks(), TransferLink(("127.0.0.1", 1)) as link:
        with pytest.raises(InputError, match=problem):
            link.open(grant_for(segments(1000)), sizes, label=label)
        assert not link.busy


def test_transfer_ids_are_uuids() -> None:
    with Listener() as listener:
        grant = new_grant("x", max_bytes=1, deadline_s=1)
        with pytest.raises(InputError, match="not a transfer id"):
            listener.expect(msgspec.structs.replace(grant, transfer_id="7"), Owner())
