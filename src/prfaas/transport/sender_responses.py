"""What the receiver's response frames change in the state of a link's sender. Thread-safe, no
sockets.

A response about a transfer that the sender no longer has is ignored.
"""

from __future__ import annotations

from prfaas.transport.messages import Ended
from prfaas.transport.sender_state import SenderState, set_done


class ResponseHandler:
    def __init__(self, state: SenderState) -> None:
        self._state = state

    def on_opened(self, transfer_id: bytes, now: float) -> None:
        state = self._state
        with state.lock:
            transfer = state.transfers.get(transfer_id)
            if transfer is not None:
                transfer.opened, transfer.opening = True, False
                transfer.progress_s = now

    def on_acknowledged(self, transfer_id: bytes, sequence: int, now: float) -> None:
        state = self._state
        with state.lock:
            transfer = state.transfers.get(transfer_id)
            if transfer is not None:
                outstanding = state.outstanding_bytes()
                counted = transfer.partly_arrived_bytes(sequence)
                nbytes = transfer.acknowledge(sequence)
                state.in_flight_bytes -= nbytes
                state.delivery.record_arrival(nbytes - counted, outstanding, now)
                transfer.progress_s = now

    def on_progress(self, transfer_id: bytes, sequence: int, nbytes: int, now: float) -> None:
        """A part of a frame has arrived. The part is not verified and counts only for rates."""
        state = self._state
        with state.lock:
            transfer = state.transfers.get(transfer_id)
            if transfer is not None:
                outstanding = state.outstanding_bytes()
                more = transfer.record_progress(sequence, nbytes)
                if more:
                    state.delivery.record_arrival(more, outstanding, now)
                    if transfer.record_advance():
                        transfer.progress_s = now

    def on_alive(self, transfer_id: bytes, now: float) -> None:
        """The receiver answered a probe. A transfer that waits for segments is not stalled. One
        with bytes to deliver is, when only its probes are answered."""
        state = self._state
        with state.lock:
            transfer = state.transfers.get(transfer_id)
            if transfer is not None:
                transfer.lost_probes = 0
                if not transfer.outstanding_bytes:
                    transfer.progress_s = now

    def on_round_trip(self, seconds: float, now: float) -> None:
        """The receiver answered a small message after `seconds`."""
        state = self._state
        with state.lock:
            state.delivery.record_round_trip(seconds, now)

    def on_ended(self, transfer_id: bytes, result: Ended, now: float) -> None:
        state = self._state
        with state.lock:
            transfer = state.transfers.get(transfer_id)
            finished = None
            if transfer is not None:
                if result.committed:  # the commit also acknowledges the last frame
                    left = transfer.outstanding_bytes
                    state.delivery.record_arrival(left, state.outstanding_bytes(), now)
                    state.in_flight_bytes -= transfer.acknowledge_all()
                finished = state.end(transfer, "" if result.committed else result.reason)
        set_done(finished)
