"""What is sent next: order, budget, pacing, loss and ends, without a socket."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import TransferFailed
from prfaas.lateness import never_late
from prfaas.transport.link import FrameSize, LinkOptions
from prfaas.transport.messages import Ended, Manifest, ManifestSegment
from prfaas.transport.sender import (
    Backlog,
    Nothing,
    SendAbort,
    SenderTransfers,
    SendFrame,
    SendOpen,
    SendProbe,
    Work,
)
from prfaas.transport.sender_transfer import SenderTransfer

QUANTUM = 4096


def departures(*, in_flight: int = 1 << 30, rate_bps: float | None = None) -> SenderTransfers:
    return SenderTransfers(
        in_flight_limit=in_flight,
        rate_bps=rate_bps,
        open_s=5,
        stall_s=20,
        probe_s=2,
    )


def outgoing(name: int, sizes: list[int], priority: int = 0) -> SenderTransfer:
    manifest = Manifest(QUANTUM, tuple(ManifestSegment(f"s{i}", n) for i, n in enumerate(sizes)))
    return SenderTransfer(bytes([name]) * 16, b"", manifest, priority, now=0.0)


def begin(link: SenderTransfers, transfer: SenderTransfer, *, ready: bool = True) -> None:
    link.add(transfer)
    assert link.take(0.0, QUANTUM) == SendOpen(transfer)
    link.left(transfer)
    link.opened(transfer.transfer_id, 0.0)
    if ready:
        for i, segment in enumerate(transfer.manifest.segments):
            link.ready(transfer, {f"s{i}": [memoryview(bytes(segment.nbytes))]}, 0.0)


def backlog(link: SenderTransfers, now: float) -> Backlog:
    return link.backlog(now, never_late)


def take_frame(link: SenderTransfers, now: float = 0.0) -> SendFrame:
    work = link.take(now, QUANTUM)
    assert isinstance(work, SendFrame)
    link.left(work.transfer)
    return work


def test_nothing_goes_before_the_receiver_has_opened() -> None:
    link, transfer = departures(), outgoing(1, [10])
    link.add(transfer)
    link.ready(transfer, {"s0": [memoryview(bytes(10))]}, 0.0)
    opening = link.take(0.0, QUANTUM)
    assert opening == SendOpen(transfer)
    assert isinstance(link.take(0.0, QUANTUM), Nothing)
    link.lost(SendOpen(transfer))  # the connection broke: the next one opens
    assert link.take(0.0, QUANTUM) == SendOpen(transfer)


def test_urgent_first_and_equals_take_turns() -> None:
    link = departures()
    slow, a, b = (
        outgoing(1, [9 * QUANTUM], 1),
        outgoing(2, [2 * QUANTUM]),
        outgoing(3, [QUANTUM] * 2),
    )
    for transfer in (slow, a, b):
        begin(link, transfer)
    order = [take_frame(link).transfer for _ in range(6)]
    assert order[:4] in ([a, b, a, b], [b, a, b, a])
    assert order[4:] == [slow, slow]


def test_small_segments_share_a_frame_and_large_ones_are_cut() -> None:
    link = departures()
    transfer = outgoing(1, [100] * 300 + [5 * QUANTUM])
    begin(link, transfer)
    frames = []
    while not isinstance(work := link.take(0.0, 3 * QUANTUM), Nothing | SendProbe):
        assert isinstance(work, SendFrame)
        link.left(transfer)
        frames.append(work.frame)
    assert sum(frame.nbytes for frame in frames) == transfer.total_bytes
    assert all(frame.nbytes < 4 * QUANTUM for frame in frames)
    assert len(frames) < 15
    pieces = [piece for frame in frames for piece in frame.pieces]
    assert len(set(pieces)) == len(pieces)


def test_the_in_flight_budget_holds_frames_back() -> None:
    link = departures(in_flight=2 * QUANTUM)
    transfer = outgoing(1, [10 * QUANTUM])
    begin(link, transfer)
    first, _ = take_frame(link), take_frame(link)
    assert isinstance(link.take(0.0, QUANTUM), Nothing)
    link.acknowledged(transfer.transfer_id, first.frame.sequence, 1.0)
    take_frame(link)
    assert isinstance(link.take(0.0, QUANTUM), Nothing)
    assert backlog(link, 0.0).in_flight_bytes == 2 * QUANTUM


def test_pacing_spreads_frames_evenly_and_saves_up_nothing() -> None:
    link = departures(rate_bps=QUANTUM * 8 * 10)  # ten frames a second
    transfer = outgoing(1, [100 * QUANTUM])
    begin(link, transfer)
    now, sent_at = 50.0, []  # fifty idle seconds earn no burst beyond one frame
    while now < 52.0:
        work = link.take(now, QUANTUM)
        if isinstance(work, Nothing):
            now += work.wait_s
        else:
            assert isinstance(work, SendFrame)
            link.left(transfer)
            sent_at.append(now)
    assert 20 <= len(sent_at) <= 22
    link.pace(None)
    for _ in range(50):
        take_frame(link, now)


def test_lost_frames_go_first_and_acknowledged_ones_never_again() -> None:
    link = departures()
    transfer = outgoing(1, [5 * QUANTUM])
    begin(link, transfer)
    one, two, three = take_frame(link), take_frame(link), take_frame(link)
    link.acknowledged(transfer.transfer_id, two.frame.sequence, 0.0)
    link.lost(one)
    link.lost(two)  # an acknowledgement and a broken connection crossed
    again = take_frame(link)
    assert again.frame.pieces == one.frame.pieces
    rest = [take_frame(link).frame.pieces for _ in range(2)]
    assert two.frame.pieces not in rest and three.frame.pieces not in rest


def test_idle_transfers_are_probed_so_that_their_lease_lives() -> None:
    link, transfer = departures(), outgoing(1, [10])
    begin(link, transfer, ready=False)
    assert isinstance(link.take(1.9, QUANTUM), Nothing)
    assert link.take(2.1, QUANTUM) == SendProbe(transfer)
    link.left(transfer)
    assert isinstance(link.take(2.2, QUANTUM), Nothing)
    for now in range(3, 60, 2):  # answered probes: waiting for segments is no stall
        link.alive(transfer.transfer_id, now)
        link.fail_stalled(now + 1)
    assert not transfer.done.done()


def test_a_transfer_nobody_opens_or_acknowledges_fails_and_says_why() -> None:
    link = departures()
    unopened, stalled = outgoing(1, [10]), outgoing(2, [10])
    begin(link, stalled)
    link.add(unopened)
    link.trouble("10.0.0.1:9: Connection refused")
    link.fail_stalled(4.9)
    assert not unopened.done.done()
    link.fail_stalled(5.0)
    with pytest.raises(TransferFailed, match=r"not opened within 5 s \(10.0.0.1:9: Connection ref"):
        unopened.done.result(0)
    link.fail_stalled(20.0)
    with pytest.raises(TransferFailed, match="nothing acknowledged for 20 s"):
        stalled.done.result(0)
    aborts = [link.take(20.0, QUANTUM), link.take(20.0, QUANTUM)]
    assert all(isinstance(work, SendAbort) for work in aborts)


def test_done_waits_for_the_last_reader() -> None:
    link, transfer = departures(), outgoing(1, [2 * QUANTUM])
    begin(link, transfer)
    first = link.take(0.0, QUANTUM)
    second = link.take(0.0, QUANTUM)
    assert isinstance(first, SendFrame) and isinstance(second, SendFrame)
    link.abort(transfer, "changed my mind")
    link.left(transfer)
    assert not transfer.done.done()  # one connection still reads the buffers
    link.left(transfer)
    with pytest.raises(TransferFailed, match="aborted: changed my mind"):
        transfer.done.result(0)
    assert backlog(link, 0.0).in_flight_bytes == 0


def test_bytes_wait_from_when_they_are_ready() -> None:
    link, transfer = departures(), outgoing(1, [2 * QUANTUM])
    link.add(transfer)
    assert backlog(link, 2.0).delivered.waited_s == 0, "nothing is ready yet"
    link.ready(transfer, {"s0": [memoryview(bytes(2 * QUANTUM))]}, 3.0)
    assert backlog(link, 5.0).delivered.waited_s == 2, "it waits also before the transfer is open"
    assert isinstance(link.take(5.0, QUANTUM), SendOpen)
    link.opened(transfer.transfer_id, 6.0)
    frames = [link.take(6.0, QUANTUM) for _ in range(2)]
    for frame in frames:
        assert isinstance(frame, SendFrame)
        link.acknowledged(transfer.transfer_id, frame.frame.sequence, 8.0)
    assert backlog(link, 20.0).delivered.waited_s == 0


def test_parts_of_frames_count_as_delivered_once() -> None:
    link, transfer = departures(), outgoing(1, [2 * QUANTUM])
    begin(link, transfer)
    first, second = take_frame(link), take_frame(link)

    def delivered() -> int:
        return backlog(link, 1.0).delivered.total_bytes

    link.progressed(transfer.transfer_id, first.frame.sequence, 100, 1.0)
    assert delivered() == 100
    link.progressed(transfer.transfer_id, first.frame.sequence, 90, 1.0)  # an older message
    link.progressed(transfer.transfer_id, first.frame.sequence, 10 * QUANTUM, 1.0)  # a false one
    assert delivered() == QUANTUM and transfer.acknowledged_bytes == 0
    link.acknowledged(transfer.transfer_id, first.frame.sequence, 1.0)
    assert delivered() == QUANTUM == transfer.acknowledged_bytes
    link.progressed(transfer.transfer_id, second.frame.sequence, 50, 1.0)
    link.lost(second)
    link.progressed(transfer.transfer_id, second.frame.sequence, 60, 1.0)
    assert delivered() == QUANTUM + 50
    assert transfer.outstanding_bytes == QUANTUM, "what was lost has to arrive again"


def test_a_commit_counts_every_byte() -> None:
    link, transfer = departures(), outgoing(1, [2 * QUANTUM])
    begin(link, transfer)
    take_frame(link)
    take_frame(link)
    link.ended(transfer.transfer_id, Ended(True), 3.0)
    assert transfer.done.result(0) is None
    assert backlog(link, 4.0) == (0, 0, 0, (2 * QUANTUM, 0.0, None))
    link.ended(
        transfer.transfer_id, Ended(False, "late"), 5.0
    )  # of a transfer that is gone: nothing


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3 * QUANTUM), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_every_byte_leaves_whatever_gets_lost(sizes: list[list[int]], seed: int) -> None:
    rng = random.Random(seed)
    link = departures(in_flight=4 * QUANTUM)
    transfers = [outgoing(i, each) for i, each in enumerate(sizes)]
    arrived: dict[bytes, set[object]] = {t.transfer_id: set() for t in transfers}
    for transfer in transfers:
        begin(link, transfer)
    flying: list[Work] = []
    for _ in range(2000):
        work = link.take(0.0, QUANTUM)
        if isinstance(work, Nothing) and not flying:
            break
        if isinstance(work, SendFrame):
            link.left(work.transfer)
            flying.append(work)
        if flying and (isinstance(work, Nothing) or rng.random() < 0.5):
            answer = flying.pop(rng.randrange(len(flying)))
            assert isinstance(answer, SendFrame)
            if rng.random() < 0.3:
                link.lost(answer)
            else:
                arrived[answer.transfer.transfer_id] |= set(answer.frame.pieces)
                link.acknowledged(answer.transfer.transfer_id, answer.frame.sequence, 0.0)
    left = backlog(link, 0.0)
    assert left.pending_bytes == left.in_flight_bytes == 0
    for transfer in transfers:
        assert transfer.acknowledged_bytes == transfer.total_bytes
        pieces = arrived[transfer.transfer_id]
        assert sum(piece.raw_bytes for piece in pieces) == transfer.total_bytes  # type: ignore[attr-defined]


def test_frames_grow_on_a_fast_connection_and_shrink_on_a_slow_one() -> None:
    options = LinkOptions(frame_bytes=1 << 20, quantum_bytes=64 << 10)
    size = FrameSize(options)
    assert size.nbytes == 64 << 10
    for _ in range(10):
        size.took(size.nbytes, 0.001)
    assert size.nbytes == 1 << 20
    size.took(10, 0.0001)  # a small frame was quick: that says nothing of large ones
    size.took(size.nbytes, 0.01)
    assert size.nbytes == 1 << 20
    for _ in range(10):
        size.took(size.nbytes, 0.1)
    assert size.nbytes == 64 << 10
    size.took(100, 0.001)
    assert size.nbytes == 64 << 10
