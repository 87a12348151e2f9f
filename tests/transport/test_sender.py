"""The choice of what to send next: order, in-flight limit, pacing, loss and ends, no sockets."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import InputError, TransferFailed
from prfaas.lateness import never_late
from prfaas.transport.delivery import IN_FLIGHT_S, LEAST_IN_FLIGHT_BYTES
from prfaas.transport.link import FrameSize, LinkOptions
from prfaas.transport.messages import Ended, Manifest, ManifestSegment
from prfaas.transport.sender import (
    MAX_ABORTS,
    Backlog,
    NoWork,
    SendAbort,
    SenderTransfers,
    SendFrame,
    SendOpen,
    SendProbe,
    Work,
)
from prfaas.transport.sender_transfer import SenderTransfer

QUANTUM = 4096


def make_sender(*, in_flight: int = 1 << 30, rate_bps: float | None = None) -> SenderTransfers:
    return SenderTransfers(
        in_flight_limit=in_flight,
        rate_bps=rate_bps,
        open_s=5,
        stall_s=20,
        probe_s=2,
        abort_s=7,
    )


def make_transfer(name: int, sizes: list[int], priority: int = 0) -> SenderTransfer:
    manifest = Manifest(QUANTUM, tuple(ManifestSegment(f"s{i}", n) for i, n in enumerate(sizes)))
    return SenderTransfer(bytes([name]) * 16, b"", manifest, priority, now=0.0)


def begin(sender: SenderTransfers, transfer: SenderTransfer, *, ready: bool = True) -> None:
    sender.add(transfer)
    assert sender.take(0.0, QUANTUM) == SendOpen(transfer)
    sender.release(transfer)
    sender.responses.on_opened(transfer.transfer_id, 0.0)
    if ready:
        for i, segment in enumerate(transfer.manifest.segments):
            sender.mark_ready(transfer, {f"s{i}": [memoryview(bytes(segment.nbytes))]}, 0.0)


def backlog(sender: SenderTransfers, now: float) -> Backlog:
    return sender.backlog(now, never_late)


def take_frame(sender: SenderTransfers, now: float = 0.0) -> SendFrame:
    work = sender.take(now, QUANTUM)
    assert isinstance(work, SendFrame)
    sender.release(work.transfer)
    return work


def test_no_frame_is_sent_before_the_receiver_has_opened_the_transfer() -> None:
    sender, transfer = make_sender(), make_transfer(1, [10])
    sender.add(transfer)
    sender.mark_ready(transfer, {"s0": [memoryview(bytes(10))]}, 0.0)
    opening = sender.take(0.0, QUANTUM)
    assert opening == SendOpen(transfer)
    assert isinstance(sender.take(0.0, QUANTUM), NoWork)
    sender.mark_lost(SendOpen(transfer))  # the connection broke: the next one opens
    assert sender.take(0.0, QUANTUM) == SendOpen(transfer)


def test_urgent_first_and_equals_take_turns() -> None:
    sender = make_sender()
    slow, a, b = (
        make_transfer(1, [9 * QUANTUM], 1),
        make_transfer(2, [2 * QUANTUM]),
        make_transfer(3, [QUANTUM] * 2),
    )
    for transfer in (slow, a, b):
        begin(sender, transfer)
    order = [take_frame(sender).transfer for _ in range(6)]
    assert order[:4] in ([a, b, a, b], [b, a, b, a])
    assert order[4:] == [slow, slow]


def test_small_segments_share_a_frame_and_large_ones_are_cut() -> None:
    sender = make_sender()
    transfer = make_transfer(1, [100] * 300 + [5 * QUANTUM])
    begin(sender, transfer)
    frames = []
    while not isinstance(work := sender.take(0.0, 3 * QUANTUM), NoWork | SendProbe):
        assert isinstance(work, SendFrame)
        sender.release(transfer)
        frames.append(work.frame)
    assert sum(frame.nbytes for frame in frames) == transfer.total_bytes
    assert all(frame.nbytes < 4 * QUANTUM for frame in frames)
    assert len(frames) < 15
    pieces = [piece for frame in frames for piece in frame.pieces]
    assert len(set(pieces)) == len(pieces)


def test_the_in_flight_budget_holds_frames_back() -> None:
    sender = make_sender(in_flight=2 * QUANTUM)
    transfer = make_transfer(1, [10 * QUANTUM])
    begin(sender, transfer)
    first, _ = take_frame(sender), take_frame(sender)
    assert isinstance(sender.take(0.0, QUANTUM), NoWork)
    sender.responses.on_acknowledged(transfer.transfer_id, first.frame.sequence, 1.0)
    take_frame(sender)
    assert isinstance(sender.take(0.0, QUANTUM), NoWork)
    assert backlog(sender, 0.0).in_flight_bytes == 2 * QUANTUM


class SlowPath:
    """Acknowledges frames in the order in which they were sent, at a rate."""

    def __init__(self, sender: SenderTransfers, frame_bytes: int) -> None:
        self.sender = sender
        self.frame_bytes = frame_bytes
        self.now = 0.0
        self.frames: list[SendFrame] = []
        self.arrived_bytes = 0
        self._credit = 0.0

    def run(self, seconds: float, bytes_per_s: float) -> None:
        for _ in range(round(seconds / 0.05)):
            while isinstance(work := self.sender.take(self.now, self.frame_bytes), SendFrame):
                self.sender.release(work.transfer)
                self.frames.append(work)
            self.now += 0.05
            self._credit += bytes_per_s * 0.05
            while self.frames and self._credit >= self.frames[0].frame.nbytes:
                first = self.frames.pop(0)
                self._credit -= first.frame.nbytes
                self.arrived_bytes += first.frame.nbytes
                self.sender.responses.on_acknowledged(
                    first.transfer.transfer_id, first.frame.sequence, self.now
                )

    @property
    def in_flight_bytes(self) -> int:
        return backlog(self.sender, self.now).in_flight_bytes


MB, FRAME = 1 << 20, 256 << 10


def test_a_slow_link_has_few_bytes_in_flight_and_is_used_completely() -> None:
    sender = make_sender(in_flight=64 * MB)
    begin(sender, make_transfer(1, [200 * MB]))
    path = SlowPath(sender, FRAME)
    path.run(1.0, 4 * MB)
    assert path.in_flight_bytes > 50 * MB, "until the rate is known, the buffers decide"
    path.run(20.0, 4 * MB)
    assert 7 * MB <= path.in_flight_bytes <= IN_FLIGHT_S * 4.5 * MB + FRAME
    assert path.arrived_bytes == pytest.approx(21 * 4 * MB, rel=0.02)


def test_a_link_that_becomes_faster_soon_has_more_in_flight() -> None:
    sender = make_sender(in_flight=16 * MB)
    begin(sender, make_transfer(1, [400 * MB]))
    path = SlowPath(sender, FRAME)
    path.run(20.0, 1 * MB)
    assert path.in_flight_bytes <= max(LEAST_IN_FLIGHT_BYTES, IN_FLIGHT_S * 1.2 * MB) + FRAME
    path.run(8.0, 20 * MB)
    assert path.in_flight_bytes > 12 * MB


def test_a_link_on_which_nothing_arrives_gets_no_more_bytes() -> None:
    sender = make_sender(in_flight=64 * MB)
    begin(sender, make_transfer(1, [200 * MB]))
    path = SlowPath(sender, FRAME)
    path.run(20.0, 4 * MB)
    path.run(10.0, 0.0)
    assert path.in_flight_bytes <= IN_FLIGHT_S * 4.5 * MB + FRAME


def test_pacing_spreads_frames_evenly_without_saving_up_a_burst() -> None:
    sender = make_sender(rate_bps=QUANTUM * 8 * 10)  # ten frames a second
    transfer = make_transfer(1, [100 * QUANTUM])
    begin(sender, transfer)
    now, sent_at = 50.0, []  # fifty idle seconds earn no burst beyond one frame
    while now < 52.0:
        work = sender.take(now, QUANTUM)
        if isinstance(work, NoWork):
            now += work.wait_s
        else:
            assert isinstance(work, SendFrame)
            sender.release(transfer)
            sent_at.append(now)
    assert 20 <= len(sent_at) <= 22
    sender.set_rate(None)
    for _ in range(50):
        take_frame(sender, now)


def test_lost_frames_go_first_and_acknowledged_ones_never_again() -> None:
    sender = make_sender()
    transfer = make_transfer(1, [5 * QUANTUM])
    begin(sender, transfer)
    one, two, three = take_frame(sender), take_frame(sender), take_frame(sender)
    sender.responses.on_acknowledged(transfer.transfer_id, two.frame.sequence, 0.0)
    sender.mark_lost(one)
    sender.mark_lost(two)  # an acknowledgement and a broken connection crossed
    again = take_frame(sender)
    assert again.frame.pieces == one.frame.pieces
    rest = [take_frame(sender).frame.pieces for _ in range(2)]
    assert two.frame.pieces not in rest and three.frame.pieces not in rest


def test_idle_transfers_are_probed_to_renew_their_grant() -> None:
    sender, transfer = make_sender(), make_transfer(1, [10])
    begin(sender, transfer, ready=False)
    assert isinstance(sender.take(1.9, QUANTUM), NoWork)
    assert sender.take(2.1, QUANTUM) == SendProbe(transfer)
    sender.release(transfer)
    assert isinstance(sender.take(2.2, QUANTUM), NoWork)
    for now in range(3, 60, 2):  # answered probes: waiting for segments is not a stall
        sender.responses.on_alive(transfer.transfer_id, now)
        sender.fail_stalled(now + 1)
    assert not transfer.done.done()


def test_an_unopened_or_stalled_transfer_fails_with_the_reason() -> None:
    sender = make_sender()
    unopened, stalled = make_transfer(1, [10]), make_transfer(2, [10])
    begin(sender, stalled)
    sender.add(unopened)
    sender.record_error("10.0.0.1:9: Connection refused")
    sender.fail_stalled(4.9)
    assert not unopened.done.done()
    sender.fail_stalled(5.0)
    with pytest.raises(TransferFailed, match=r"not opened within 5 s \(10.0.0.1:9: Connection ref"):
        unopened.done.result(0)
    assert isinstance(sender.take(5.0, QUANTUM), SendAbort)
    sender.fail_stalled(20.0)
    with pytest.raises(TransferFailed, match="nothing acknowledged for 20 s"):
        stalled.done.result(0)
    assert isinstance(sender.take(20.0, QUANTUM), SendAbort)


def test_aborts_that_cannot_be_sent_are_dropped_in_time_and_are_bounded() -> None:
    sender = make_sender()
    for number in range(MAX_ABORTS + 5):
        transfer = make_transfer(1, [10])
        sender.add(transfer)
        sender.abort(transfer, str(number), now=1.0)
    assert sender.busy
    oldest = sender.take(1.0, QUANTUM)
    assert isinstance(oldest, SendAbort) and oldest.reason == "5", "the oldest five are dropped"
    sender.release(oldest.transfer)
    sender.fail_stalled(7.9)
    assert sender.busy
    sender.fail_stalled(8.0)
    assert not sender.busy
    assert sender.close_if_idle()
    with pytest.raises(InputError, match="closed"):
        sender.add(make_transfer(2, [10]))


def test_a_transfer_that_is_under_way_cannot_be_added_again() -> None:
    sender, transfer = make_sender(), make_transfer(1, [10])
    begin(sender, transfer)
    again = make_transfer(1, [20], priority=1)
    with pytest.raises(InputError, match="under way on this link; use a grant once"):
        sender.add(again)
    assert backlog(sender, 0.0).transfers == 1
    frame = take_frame(sender)
    assert frame.transfer is transfer
    sender.responses.on_ended(transfer.transfer_id, Ended(True), 1.0)
    assert transfer.done.result(0) is None and not again.done.done()


def test_acknowledgements_after_the_commit_count_nothing_twice() -> None:
    """With several connections the commit may come before the acknowledgement of a frame, while
    the kernel still reads its buffer."""
    sender, transfer = make_sender(), make_transfer(1, [QUANTUM, QUANTUM])
    begin(sender, transfer)
    works = [sender.take(0.0, QUANTUM) for _ in range(2)]
    frames = [work.frame for work in works if isinstance(work, SendFrame)]
    assert len(frames) == 2
    sender.responses.on_ended(transfer.transfer_id, Ended(True), 1.0)
    for frame in frames:
        sender.responses.on_acknowledged(transfer.transfer_id, frame.sequence, 1.0)
    assert not transfer.done.done()
    assert transfer.acknowledged_bytes == 2 * QUANTUM
    assert backlog(sender, 1.0).in_flight_bytes == 0
    for _ in works:
        sender.release(transfer)
    assert transfer.done.done()
    assert backlog(sender, 1.0).in_flight_bytes == 0


def test_what_is_left_of_a_transfer_does_not_touch_a_later_one_of_the_same_id() -> None:
    sender, first = make_sender(), make_transfer(1, [10])
    begin(sender, first)
    lost = take_frame(sender)
    sender.abort(first, "changed my mind", 0.0)
    second = make_transfer(1, [10])
    sender.add(second)
    abort = sender.take(0.0, QUANTUM)
    assert isinstance(abort, SendAbort) and abort.transfer is first
    sender.release(first)
    sender.mark_lost(lost)
    assert sender.take(0.0, QUANTUM) == SendOpen(second)
    sender.release(second)
    assert backlog(sender, 0.0).transfers == 1 and not second.done.done()
    assert backlog(sender, 0.0).in_flight_bytes == 0


def test_segments_that_were_not_announced_change_nothing() -> None:
    sender, transfer = make_sender(), make_transfer(1, [10, 20])
    begin(sender, transfer, ready=False)
    good = {"s0": [memoryview(bytes(10))]}
    for bad, problem in (
        ({"s9": [memoryview(bytes(10))]}, "s9: the transfer has no such segment"),
        ({"s1": [memoryview(bytes(21))]}, "s1: 20 bytes announced, but the buffers have 21"),
    ):
        with pytest.raises(InputError, match=problem):
            sender.mark_ready(transfer, {**good, **bad}, 0.0)
        assert backlog(sender, 0.0).pending_bytes == 0
    sender.mark_ready(transfer, good, 0.0)
    with pytest.raises(InputError, match="s0: the segment was marked ready twice"):
        sender.mark_ready(transfer, good, 0.0)
    assert backlog(sender, 0.0).pending_bytes == 10


def test_a_receiver_that_answers_only_probes_is_stalled() -> None:
    sender, transfer = make_sender(), make_transfer(1, [QUANTUM])
    begin(sender, transfer)
    take_frame(sender)
    for now in range(1, 21):
        sender.responses.on_alive(transfer.transfer_id, now)
        sender.fail_stalled(now)
    with pytest.raises(TransferFailed, match="nothing acknowledged for 20 s"):
        transfer.done.result(0)


def test_the_same_damaged_frame_arriving_again_and_again_is_a_stall() -> None:
    sender, transfer = make_sender(), make_transfer(1, [QUANTUM])
    begin(sender, transfer)
    for now in range(21):
        frame = take_frame(sender)
        sender.responses.on_progress(
            transfer.transfer_id, frame.frame.sequence, QUANTUM // 2, float(now)
        )
        sender.mark_lost(frame)  # the receiver has rejected the frame: its checksum is wrong
        sender.fail_stalled(now)
    with pytest.raises(TransferFailed, match="nothing acknowledged for 20 s"):
        transfer.done.result(0)


def test_parts_of_a_large_frame_that_arrive_slowly_are_progress() -> None:
    sender, transfer = make_sender(), make_transfer(1, [QUANTUM])
    begin(sender, transfer)
    sequence = take_frame(sender).frame.sequence
    for now in range(60):
        sender.responses.on_progress(transfer.transfer_id, sequence, now + 1, float(now))
        sender.fail_stalled(now)
    assert transfer.ended is None


def test_a_new_connection_is_proved_by_a_grant_that_the_receiver_answers() -> None:
    sender = make_sender()
    assert sender.take_proof(0.0) is None
    unknown, known = make_transfer(1, [10]), make_transfer(2, [10])
    begin(sender, unknown)
    begin(sender, known)
    sender.mark_lost(SendProbe(unknown))
    for now in range(20):
        assert sender.take_proof(now) == SendProbe(known)
        sender.release(known)
    for _ in range(2):
        sender.mark_lost(SendProbe(known))
    assert sender.take_proof(0.0) == SendProbe(unknown)
    sender.release(unknown)
    sender.responses.on_alive(known.transfer_id, 0.0)
    assert sender.take_proof(0.0) == SendProbe(known)


def test_done_waits_for_the_last_reader() -> None:
    sender, transfer = make_sender(), make_transfer(1, [2 * QUANTUM])
    begin(sender, transfer)
    first = sender.take(0.0, QUANTUM)
    second = sender.take(0.0, QUANTUM)
    assert isinstance(first, SendFrame) and isinstance(second, SendFrame)
    sender.abort(transfer, "changed my mind", 0.0)
    sender.release(transfer)
    assert not transfer.done.done()  # one connection still reads the buffers
    sender.release(transfer)
    with pytest.raises(TransferFailed, match="aborted: changed my mind"):
        transfer.done.result(0)
    assert backlog(sender, 0.0).in_flight_bytes == 0


def test_bytes_wait_from_when_they_are_ready() -> None:
    sender, transfer = make_sender(), make_transfer(1, [2 * QUANTUM])
    sender.add(transfer)
    assert backlog(sender, 2.0).delivery.waited_s == 0, "nothing is ready yet"
    sender.mark_ready(transfer, {"s0": [memoryview(bytes(2 * QUANTUM))]}, 3.0)
    assert backlog(sender, 5.0).delivery.waited_s == 2, (
        "bytes wait also before the transfer is open"
    )
    assert isinstance(sender.take(5.0, QUANTUM), SendOpen)
    sender.responses.on_opened(transfer.transfer_id, 6.0)
    frames = [sender.take(6.0, QUANTUM) for _ in range(2)]
    for frame in frames:
        assert isinstance(frame, SendFrame)
        sender.responses.on_acknowledged(transfer.transfer_id, frame.frame.sequence, 8.0)
    assert backlog(sender, 20.0).delivery.waited_s == 0


def test_parts_of_frames_count_as_delivered_once() -> None:
    sender, transfer = make_sender(), make_transfer(1, [2 * QUANTUM])
    begin(sender, transfer)
    first, second = take_frame(sender), take_frame(sender)

    def delivered() -> int:
        return backlog(sender, 1.0).delivery.total_bytes

    sender.responses.on_progress(transfer.transfer_id, first.frame.sequence, 100, 1.0)
    assert delivered() == 100
    sender.responses.on_progress(
        transfer.transfer_id, first.frame.sequence, 90, 1.0
    )  # an older message
    sender.responses.on_progress(
        transfer.transfer_id, first.frame.sequence, 10 * QUANTUM, 1.0
    )  # a false one
    assert delivered() == QUANTUM and transfer.acknowledged_bytes == 0
    sender.responses.on_acknowledged(transfer.transfer_id, first.frame.sequence, 1.0)
    assert delivered() == QUANTUM == transfer.acknowledged_bytes
    sender.responses.on_progress(transfer.transfer_id, second.frame.sequence, 50, 1.0)
    sender.mark_lost(second)
    sender.responses.on_progress(transfer.transfer_id, second.frame.sequence, 60, 1.0)
    assert delivered() == QUANTUM + 50
    assert transfer.outstanding_bytes == QUANTUM, "what was lost has to arrive again"


def test_a_commit_counts_every_byte() -> None:
    sender, transfer = make_sender(), make_transfer(1, [2 * QUANTUM])
    begin(sender, transfer)
    take_frame(sender)
    take_frame(sender)
    sender.responses.on_ended(transfer.transfer_id, Ended(True), 3.0)
    assert transfer.done.result(0) is None
    assert backlog(sender, 4.0) == (0, 0, 0, (2 * QUANTUM, 0.0, None))
    sender.responses.on_ended(
        transfer.transfer_id, Ended(False, "late"), 5.0
    )  # the transfer is gone: no effect


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3 * QUANTUM), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_every_byte_arrives_although_frames_are_lost(sizes: list[list[int]], seed: int) -> None:
    rng = random.Random(seed)
    sender = make_sender(in_flight=4 * QUANTUM)
    transfers = [make_transfer(i, each) for i, each in enumerate(sizes)]
    arrived: dict[bytes, set[object]] = {t.transfer_id: set() for t in transfers}
    for transfer in transfers:
        begin(sender, transfer)
    flying: list[Work] = []
    for _ in range(2000):
        work = sender.take(0.0, QUANTUM)
        if isinstance(work, NoWork) and not flying:
            break
        if isinstance(work, SendFrame):
            sender.release(work.transfer)
            flying.append(work)
        if flying and (isinstance(work, NoWork) or rng.random() < 0.5):
            answer = flying.pop(rng.randrange(len(flying)))
            assert isinstance(answer, SendFrame)
            if rng.random() < 0.3:
                sender.mark_lost(answer)
            else:
                arrived[answer.transfer.transfer_id] |= set(answer.frame.pieces)
                sender.responses.on_acknowledged(
                    answer.transfer.transfer_id, answer.frame.sequence, 0.0
                )
    left = backlog(sender, 0.0)
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
        size.record(size.nbytes, 0.001)
    assert size.nbytes == 1 << 20
    size.record(10, 0.0001)  # a small frame was quick: that does not apply to large frames
    size.record(size.nbytes, 0.01)
    assert size.nbytes == 1 << 20
    for _ in range(10):
        size.record(size.nbytes, 0.1)
    assert size.nbytes == 64 << 10
    size.record(100, 0.001)
    assert size.nbytes == 64 << 10
