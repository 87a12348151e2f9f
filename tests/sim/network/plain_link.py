"""The sharing of a link in the plain way: at each event, every transfer is looked at."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from prfaas.sim.events import Events

LEAST_BITS = 100.0


class PlainTransfer:
    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.rate_bps = 0.0  # while it is produced
        self.bits = 0.0  # that wait
        self.drains = False


class PlainLink:
    def __init__(self, events: Events, bps: float) -> None:
        self.bps = bps
        self._events = events
        self._transfers: list[PlainTransfer] = []
        self._level = inf
        self._at_s = 0.0
        self._wake = 0

    def produce(self, bits: float, seconds: float, done: Callable[[], None]) -> PlainTransfer:
        transfer = PlainTransfer(done)
        transfer.rate_bps = bits / seconds
        self._advance()
        self._transfers.append(transfer)
        self._share()
        return transfer

    def drain(self, transfer: PlainTransfer, closing_bits: float) -> None:
        self._advance()
        transfer.drains = True
        transfer.rate_bps = 0.0
        transfer.bits += closing_bits
        self._share()

    def cancel(self, transfer: PlainTransfer) -> None:
        self._advance()
        if transfer in self._transfers:
            self._transfers.remove(transfer)
        self._share()

    def set_bps(self, bps: float) -> None:
        self._advance()
        self.bps = bps
        self._share()

    def backlog_bits(self) -> float:
        self._advance()
        return sum(transfer.bits for transfer in self._transfers)

    def _advance(self) -> None:
        elapsed_s = self._events.now_s - self._at_s
        self._at_s = self._events.now_s
        if elapsed_s <= 0:
            return
        for transfer in self._transfers:
            if transfer.drains or transfer.bits > 0 or transfer.rate_bps > self._level:
                transfer.bits += (transfer.rate_bps - self._level) * elapsed_s
                if transfer.bits < LEAST_BITS:
                    transfer.bits = 0.0

    def _share(self) -> None:
        clear = sorted(t.rate_bps for t in self._transfers if not t.drains and not t.bits)
        left, sharers = self.bps, len(self._transfers)
        for rate in clear:
            if rate * sharers > left:
                break
            left -= rate
            sharers -= 1
        self._level = left / sharers if sharers else inf
        ends_s = [
            transfer.bits / (self._level - transfer.rate_bps)
            for transfer in self._transfers
            if (transfer.drains or transfer.bits) and transfer.rate_bps < self._level
        ]
        self._wake += 1
        if ends_s:
            self._events.at(self._events.now_s + min(ends_s), self._on_wake, self._wake)

    def _on_wake(self, wake: int) -> None:
        if wake != self._wake:
            return
        self._advance()
        finished = [
            transfer for transfer in self._transfers if transfer.drains and not transfer.bits
        ]
        self._transfers = [transfer for transfer in self._transfers if transfer not in finished]
        self._share()
        for transfer in finished:
            transfer.done()
