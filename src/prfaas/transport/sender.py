"""All transfers of one link's sender, and what is to be sent next. Thread-safe, no sockets.

Decides order (urgent first, equals in turn), pacing and the in-flight budget. `done` of a transfer
is set only when nobody reads its buffers any more, neither a connection nor, for what was sent
straight from a file, the kernel: its owner may then reuse them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.errors import TransferFailed
from prfaas.lateness import LateSince
from prfaas.transport.buffers import FileSlice
from prfaas.transport.delivery import Delivered, Delivery
from prfaas.transport.messages import Ended
from prfaas.transport.sender_transfer import OutgoingFrame, SenderTransfer


class SendOpen(NamedTuple):
    transfer: SenderTransfer


class SendProbe(NamedTuple):
    transfer: SenderTransfer


class SendAbort(NamedTuple):
    transfer: SenderTransfer
    reason: str


class SendFrame(NamedTuple):
    transfer: SenderTransfer
    frame: OutgoingFrame


class Nothing(NamedTuple):
    """Nothing to send now; ask again after this long, or when woken."""

    wait_s: float


Work: TypeAlias = SendOpen | SendProbe | SendAbort | SendFrame


class Backlog(NamedTuple):
    transfers: int
    pending_bytes: int
    in_flight_bytes: int
    delivered: Delivered


class SenderTransfers:
    def __init__(
        self,
        *,
        in_flight_limit: int,
        rate_bps: float | None,
        open_s: float,
        stall_s: float,
        probe_s: float,
    ) -> None:
        self._in_flight_limit = in_flight_limit
        self._open_s = open_s
        self._stall_s = stall_s
        self._probe_s = probe_s
        self._lock = threading.Lock()
        self._transfers: dict[bytes, SenderTransfer] = {}
        self._turns: dict[int, deque[SenderTransfer]] = {}  # per priority
        self._aborts: deque[SendAbort] = deque()
        self._in_flight_bytes = 0
        self._delivery = Delivery()
        self._rate_bps = rate_bps
        self._may_send_s = 0.0  # pacing: not before
        self._trouble = ""  # what connections last complained of

    def pace(self, rate_bps: float | None) -> None:
        with self._lock:
            self._rate_bps = rate_bps

    def add(self, transfer: SenderTransfer) -> None:
        with self._lock:
            assert transfer.transfer_id not in self._transfers
            self._transfers[transfer.transfer_id] = transfer
            self._turns.setdefault(transfer.priority, deque()).append(transfer)

    def ready(
        self,
        transfer: SenderTransfer,
        segments: Mapping[str, Sequence[memoryview | FileSlice]],
        now: float,
    ) -> None:
        with self._lock:
            if transfer.ended is None:
                before = transfer.pending_bytes
                transfer.ready(segments)
                self._delivery.became_ready(transfer.pending_bytes - before, now)

    def take(self, now: float, frame_bytes: int) -> Work | Nothing:
        """What to send next. A frame (of about `frame_bytes`) is in flight from now on: it must be
        acknowledged or lost. When its bytes are read no more the caller says `left`."""
        with self._lock:
            if self._aborts:
                abort = self._aborts.popleft()
                abort.transfer.senders += 1
                return abort
            for transfer in self._transfers.values():
                if not transfer.opened and not transfer.opening and transfer.ended is None:
                    transfer.opening = True
                    transfer.senders += 1
                    return SendOpen(transfer)
            return self._take_frame(now, frame_bytes) or self._take_probe(now)

    def left(self, transfer: SenderTransfer) -> None:
        """The caller reads the transfer's buffers no more."""
        with self._lock:
            transfer.senders -= 1
            finished = self._finish(transfer)
        _set(finished)

    def opened(self, transfer_id: bytes, now: float) -> None:
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.opened, transfer.opening = True, False
                transfer.progress_s = now

    def acknowledged(self, transfer_id: bytes, sequence: int, now: float) -> None:
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                outstanding = self._outstanding()
                known = transfer.arriving_bytes(sequence)
                nbytes = transfer.acknowledged(sequence)
                self._in_flight_bytes -= nbytes
                self._delivery.arrived(nbytes - known, outstanding, now)
                transfer.progress_s = now

    def progressed(self, transfer_id: bytes, sequence: int, nbytes: int, now: float) -> None:
        """A part of a frame has arrived. It is not verified: it counts for rates alone."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                outstanding = self._outstanding()
                more = transfer.progressed(sequence, nbytes)
                if more:
                    self._delivery.arrived(more, outstanding, now)
                    transfer.progress_s = now

    def answered(self, seconds: float, now: float) -> None:
        """The receiver answered a message of no size after so long."""
        with self._lock:
            self._delivery.answered(seconds, now)

    def lost(self, work: Work) -> None:
        """Sent on a connection that broke, or refused by the receiver: to be sent again."""
        with self._lock:
            transfer = work.transfer
            if transfer.transfer_id not in self._transfers:
                return
            if isinstance(work, SendFrame):
                before = transfer.in_flight_bytes
                transfer.lost(work.frame.sequence)
                self._in_flight_bytes -= before - transfer.in_flight_bytes
            elif isinstance(work, SendOpen):
                transfer.opening = False

    def alive(self, transfer_id: bytes, now: float) -> None:
        """The receiver answered a probe: waiting for segments is not a stall."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.progress_s = now

    def ended(self, transfer_id: bytes, result: Ended, now: float) -> None:
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            finished = None
            if transfer is not None:
                if result.committed:  # the last frame is answered with the commit itself
                    left = transfer.outstanding_bytes
                    self._delivery.arrived(left, self._outstanding(), now)
                    transfer.acknowledged_bytes = transfer.total_bytes
                finished = self._end(transfer, "" if result.committed else result.reason)
        _set(finished)

    def abort(self, transfer: SenderTransfer, reason: str) -> None:
        with self._lock:
            finished = None
            if transfer.ended is None and transfer.transfer_id in self._transfers:
                self._aborts.append(SendAbort(transfer, reason))
                finished = self._end(transfer, f"aborted: {reason}")
        _set(finished)

    def fail_stalled(self, now: float) -> None:
        with self._lock:
            finished = []
            for transfer in list(self._transfers.values()):
                why = self._stalled(transfer, now)
                if why:
                    # Told on the next connection there is: the receiver then need not wait.
                    self._aborts.append(SendAbort(transfer, why))
                    finished.append(self._end(transfer, why))
        for one in finished:
            _set(one)

    def fail_all(self, reason: str) -> None:
        with self._lock:
            finished = [self._end(t, reason) for t in list(self._transfers.values())]
        for one in finished:
            _set(one)

    def trouble(self, what: str) -> None:
        """Remembered for the message of a transfer that fails later."""
        with self._lock:
            self._trouble = what

    @property
    def busy(self) -> bool:
        with self._lock:
            return bool(self._transfers or self._aborts)

    def backlog(self, now: float, late_since: LateSince) -> Backlog:
        with self._lock:
            pending = sum(transfer.pending_bytes for transfer in self._transfers.values())
            return Backlog(
                len(self._transfers),
                pending,
                self._in_flight_bytes,
                self._delivery.report(self._outstanding(), now, late_since),
            )

    # Called with the lock held --------------------------------------------------------------------

    def _outstanding(self) -> int:
        return sum(t.outstanding_bytes for t in self._transfers.values() if t.ended is None)

    def _take_frame(self, now: float, frame_bytes: int) -> SendFrame | Nothing | None:
        transfer = self._next_transfer()
        if transfer is None:
            return None
        if self._in_flight_bytes and self._in_flight_bytes >= self._in_flight_limit:
            return Nothing(self._probe_s)  # an acknowledgement wakes us
        if self._rate_bps is not None and now < self._may_send_s:
            return Nothing(self._may_send_s - now)
        frame = transfer.next_frame(frame_bytes)
        transfer.senders += 1
        transfer.probed_s = now
        self._in_flight_bytes += frame.nbytes
        if self._rate_bps is not None:
            # Unused time is not saved up beyond one frame: bursts are what pacing is against.
            frame_s = frame.nbytes * 8 / self._rate_bps
            self._may_send_s = max(self._may_send_s, now - frame_s) + frame_s
        return SendFrame(transfer, frame)

    def _next_transfer(self) -> SenderTransfer | None:
        for priority in sorted(self._turns):
            turns = self._turns[priority]
            for _ in range(len(turns)):
                transfer = turns[0]
                turns.rotate(-1)
                if transfer.can_send:
                    return transfer
        return None

    def _take_probe(self, now: float) -> SendProbe | Nothing:
        wait_s = self._probe_s
        for transfer in self._transfers.values():
            if not transfer.opened or transfer.ended is not None:
                continue
            due_s = transfer.probed_s + self._probe_s
            if now >= due_s:
                transfer.probed_s = now
                transfer.senders += 1
                return SendProbe(transfer)
            wait_s = min(wait_s, due_s - now)
        return Nothing(wait_s)

    def _stalled(self, transfer: SenderTransfer, now: float) -> str:
        if not transfer.opened and now - transfer.began_s >= self._open_s:
            why = f"not opened within {self._open_s:g} s"
        elif now - transfer.progress_s >= self._stall_s:
            why = f"nothing acknowledged for {self._stall_s:g} s"
        else:
            return ""
        return f"{why} ({self._trouble})" if self._trouble else why

    def _end(self, transfer: SenderTransfer, why: str) -> SenderTransfer | None:
        if transfer.ended is None:
            transfer.ended = why
        return self._finish(transfer)

    def _finish(self, transfer: SenderTransfer) -> SenderTransfer | None:
        """Forgets a transfer that has ended and is not being read; the caller sets its `done`."""
        if transfer.ended is None or transfer.senders:
            return None
        if self._transfers.pop(transfer.transfer_id, None) is None:
            return None
        self._turns[transfer.priority].remove(transfer)
        self._in_flight_bytes -= transfer.in_flight_bytes
        return transfer


def _set(transfer: SenderTransfer | None) -> None:
    """Outside the lock: a Future runs its callbacks in this thread."""
    if transfer is None:
        return
    if transfer.ended:
        transfer.done.set_exception(TransferFailed(transfer.ended))
    else:
        transfer.done.set_result(None)
