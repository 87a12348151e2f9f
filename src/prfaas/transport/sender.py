"""All transfers of one link's sender, and the choice of what to send next. Thread-safe, no sockets.

This module decides the order (urgent transfers first, transfers of equal priority in turn), pacing
and the in-flight limit. It sets `done` of a transfer only when nothing reads the transfer's buffers
any more: no connection, and for bytes that were sent straight from a file, not the kernel either.
The owner may then reuse the buffers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.lateness import LateSince
from prfaas.transport.buffers import FileSlice
from prfaas.transport.delivery import DeliveryReport, InFlightLimit
from prfaas.transport.sender_responses import ResponseHandler
from prfaas.transport.sender_state import SenderState, set_done
from prfaas.transport.sender_transfer import SenderFrame, SenderTransfer


class SendOpen(NamedTuple):
    transfer: SenderTransfer


class SendProbe(NamedTuple):
    transfer: SenderTransfer


class SendAbort(NamedTuple):
    transfer: SenderTransfer
    reason: str
    until_s: float  # not sent after this time


class SendFrame(NamedTuple):
    transfer: SenderTransfer
    frame: SenderFrame


class NoWork(NamedTuple):
    """There is nothing to send now. Call `take` again after this time, or when woken."""

    wait_s: float


MAX_ABORTS = 1_024  # that wait to be sent; beyond this number the oldest is dropped

Work: TypeAlias = SendOpen | SendProbe | SendAbort | SendFrame


class Backlog(NamedTuple):
    transfers: int
    pending_bytes: int
    in_flight_bytes: int
    delivery: DeliveryReport


class SenderTransfers:
    """`responses` applies the receiver's response frames to the same transfers."""

    def __init__(
        self,
        *,
        in_flight_limit: int,
        rate_bps: float | None,
        open_s: float,
        stall_s: float,
        probe_s: float,
        abort_s: float,
    ) -> None:
        self._in_flight_limit = InFlightLimit(in_flight_limit)
        self._open_s = open_s
        self._stall_s = stall_s
        self._probe_s = probe_s
        self._abort_s = abort_s
        self._state = SenderState()
        self.responses = ResponseHandler(self._state)
        # A receiver that is not told frees its memory when the grant expires.
        self._aborts: deque[SendAbort] = deque(maxlen=MAX_ABORTS)
        self._rate_bps = rate_bps
        self._may_send_s = 0.0  # pacing: the earliest time of the next frame
        self._last_error = ""  # the latest error of any connection

    def set_rate(self, rate_bps: float | None) -> None:
        with self._state.lock:
            self._rate_bps = rate_bps

    def add(self, transfer: SenderTransfer) -> None:
        """Raises InputError, and changes nothing, when a transfer of the same id is under way or
        the link is closed."""
        with self._state.lock:
            self._state.add(transfer)

    def mark_ready(
        self,
        transfer: SenderTransfer,
        segments: Mapping[str, Sequence[memoryview | FileSlice]],
        now: float,
    ) -> None:
        state = self._state
        with state.lock:
            if transfer.ended is None:
                before = transfer.pending_bytes
                transfer.mark_ready(segments)
                state.delivery.record_ready(transfer.pending_bytes - before, now)

    def take(self, now: float, frame_bytes: int) -> Work | NoWork:
        """Returns what to send next. A frame (of about `frame_bytes`) counts as in flight from now
        on and must be acknowledged or marked as lost. The caller calls `release` when it no longer
        reads the transfer's buffers."""
        with self._state.lock:
            if self._aborts:
                abort = self._aborts.popleft()
                abort.transfer.readers += 1
                return abort
            for transfer in self._state.transfers.values():
                if not transfer.opened and not transfer.opening and transfer.ended is None:
                    transfer.opening = True
                    transfer.readers += 1
                    return SendOpen(transfer)
            return self._take_frame(now, frame_bytes) or self._take_probe(now)

    def take_proof(self, now: float) -> SendProbe | None:
        """The first message of a new connection, as from `take`: it shows the receiver a grant. A
        receiver closes a connection that has shown none for a while. None: no transfer is left."""
        with self._state.lock:
            known = [t for t in self._state.transfers.values() if t.ended is None]
            if not known:
                return None
            # A receiver closes a new connection for a grant that it does not know, such as one from
            # before its restart. The other transfers must not wait for that one to fail.
            fewest = min(t.lost_probes for t in known)
            transfer = random.choice([t for t in known if t.lost_probes == fewest])
            transfer.readers += 1
            transfer.probed_s = now
            return SendProbe(transfer)

    def release(self, transfer: SenderTransfer) -> None:
        """The caller no longer reads the transfer's buffers."""
        with self._state.lock:
            transfer.readers -= 1
            finished = self._state.finish(transfer)
        set_done(finished)

    def mark_lost(self, work: Work) -> None:
        """The connection that carried this work broke, or the receiver rejected the frame. The work
        becomes pending again."""
        state = self._state
        with state.lock:
            transfer = work.transfer
            if not state.has(transfer):
                return
            if isinstance(work, SendFrame):
                before = transfer.in_flight_bytes
                transfer.mark_lost(work.frame.sequence)
                state.in_flight_bytes -= before - transfer.in_flight_bytes
            elif isinstance(work, SendOpen):
                transfer.opening = False
            elif isinstance(work, SendProbe):
                transfer.lost_probes += 1

    def abort(self, transfer: SenderTransfer, reason: str, now: float) -> None:
        state = self._state
        with state.lock:
            finished = None
            if transfer.ended is None and state.has(transfer):
                self._aborts.append(SendAbort(transfer, reason, now + self._abort_s))
                finished = state.end(transfer, f"aborted: {reason}")
        set_done(finished)

    def remove(self, transfer: SenderTransfer, reason: str) -> None:
        """Fails a transfer of which nothing has been sent; the receiver is not told."""
        with self._state.lock:
            finished = self._state.end(transfer, reason)
        set_done(finished)

    def fail_stalled(self, now: float) -> None:
        """Fails transfers that are stalled, and drops aborts that could not be sent in time."""
        state = self._state
        with state.lock:
            while self._aborts and now >= self._aborts[0].until_s:
                self._aborts.popleft()
            finished = []
            for transfer in list(state.transfers.values()):
                why = self._stall_reason(transfer, now)
                if why:
                    # The next working connection sends the abort, so that the receiver frees the
                    # memory without waiting for the grant to expire.
                    self._aborts.append(SendAbort(transfer, why, now + self._abort_s))
                    finished.append(state.end(transfer, why))
        for one in finished:
            set_done(one)

    def close(self, reason: str) -> None:
        """Fails all transfers; none can be added afterwards. Idempotent."""
        state = self._state
        with state.lock:
            state.closed = True
            self._aborts.clear()
            finished = [state.end(t, reason) for t in list(state.transfers.values())]
        for one in finished:
            set_done(one)

    def close_if_idle(self) -> bool:
        """Returns whether there was nothing to do; no transfer can be added then."""
        with self._state.lock:
            if self._state.transfers or self._aborts:
                return False
            self._state.closed = True
            return True

    def record_error(self, what: str) -> None:
        """Keeps a connection's error for the message of a transfer that fails later."""
        with self._state.lock:
            self._last_error = what

    @property
    def busy(self) -> bool:
        with self._state.lock:
            return bool(self._state.transfers or self._aborts)

    def backlog(self, now: float, late_since: LateSince) -> Backlog:
        state = self._state
        with state.lock:
            pending = sum(transfer.pending_bytes for transfer in state.transfers.values())
            return Backlog(
                len(state.transfers),
                pending,
                state.in_flight_bytes,
                state.delivery.report(state.outstanding_bytes(), now, late_since),
            )

    # The methods below require that the caller holds the lock -------------------------------------

    def _take_frame(self, now: float, frame_bytes: int) -> SendFrame | NoWork | None:
        transfer = self._next_transfer()
        if transfer is None:
            return None
        state = self._state
        limit = self._in_flight_limit.limit_bytes(state.delivery, state.in_flight_bytes, now)
        if state.in_flight_bytes and state.in_flight_bytes >= limit:
            return NoWork(self._probe_s)  # an acknowledgement wakes the connection earlier
        if self._rate_bps is not None and now < self._may_send_s:
            return NoWork(self._may_send_s - now)
        frame = transfer.next_frame(frame_bytes)
        transfer.readers += 1
        transfer.probed_s = now
        state.in_flight_bytes += frame.nbytes
        if self._rate_bps is not None:
            # Unused time is saved up for one frame at most: pacing exists to prevent bursts.
            frame_s = frame.nbytes * 8 / self._rate_bps
            self._may_send_s = max(self._may_send_s, now - frame_s) + frame_s
        return SendFrame(transfer, frame)

    def _next_transfer(self) -> SenderTransfer | None:
        all_turns = self._state.turns
        for priority in sorted(all_turns):
            turns = all_turns[priority]
            for _ in range(len(turns)):
                transfer = turns[0]
                turns.rotate(-1)
                if transfer.can_send:
                    return transfer
        return None

    def _take_probe(self, now: float) -> SendProbe | NoWork:
        wait_s = self._probe_s
        for transfer in self._state.transfers.values():
            if not transfer.opened or transfer.ended is not None:
                continue
            due_s = transfer.probed_s + self._probe_s
            if now >= due_s:
                transfer.probed_s = now
                transfer.readers += 1
                return SendProbe(transfer)
            wait_s = min(wait_s, due_s - now)
        return NoWork(wait_s)

    def _stall_reason(self, transfer: SenderTransfer, now: float) -> str:
        """Why the transfer counts as stalled; "" when it does not."""
        if not transfer.opened and now - transfer.began_s >= self._open_s:
            why = f"not opened within {self._open_s:g} s"
        elif now - transfer.progress_s >= self._stall_s:
            why = f"nothing acknowledged for {self._stall_s:g} s"
        else:
            return ""
        return f"{why} ({self._last_error})" if self._last_error else why
