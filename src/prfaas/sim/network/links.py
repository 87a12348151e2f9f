"""A link between clusters as a fluid: concurrent transfers share its bandwidth fairly.

A hand-off has two phases. While its prefill runs, KV of finished tokens is *produced* at a steady
rate and leaves as fast as its share allows; the rest is its backlog. When the prefill ends, the
backlog, windows and states *drain*.

    share level f:   sum over producing min(rate, f) + (backlogged + draining) * f = bandwidth

All draining transfers get the same share at all times. So one counter of bits per transfer serves
all of them, and a heap yields the next one that ends. Producing transfers are *clear* while they
get their whole rate: only the sum and the highest of their rates matter. Otherwise they are in
`Backlogs`. So the cost of an event grows at most with the logarithm of the number of transfers.
This module does not know requests or nodes; rates change by `set_bps` (a trace, an outage).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from prfaas.sim.events import Events
from prfaas.sim.network.backlogs import Backlogs
from prfaas.types import LinkStats

# Fewer bits than these are a rounding error and not a backlog: a clock of 10^6 s is exact to 10^-10
# s, and a link of 10^11 bits per second carries ten bits in that time. Faster links carry more.
_LEAST_BITS = 100.0
_LEAST_S = 1e-9
# As in `transport.delivery`: the arrival rate measures the link only while bytes wait this long.
STANDING_S = 0.2


class LinkTransfer:
    """One transfer on a link."""

    __slots__ = ("done", "ended", "finish_at", "rate_bps", "serial", "slot")

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done  # called when the last bit has left; the caller adds the round trip
        self.rate_bps = 0.0  # while it is produced
        self.serial: int | None = None  # while it is clear
        self.slot: int | None = None  # while it has a backlog
        self.finish_at = 0.0  # value of the shared counter
        self.ended = False


class FluidLink:
    def __init__(self, events: Events, bps: float, bin_s: float) -> None:
        self.bps = bps
        self.carried_bits: list[float] = []  # per bin of `bin_s`
        self.total_bits = 0.0  # carried since the start
        self._events = events
        self._bin_s = bin_s
        self._clear: list[tuple[float, int, LinkTransfer]] = []  # in ascending order of rates
        self._clear_bps = 0.0  # the sum of their rates
        self._backlogs = Backlogs()
        self._backlogged: dict[int, LinkTransfer] = {}  # by slot
        self._draining: list[tuple[float, int, LinkTransfer]] = []
        self._drain_count = 0  # cancelled transfers are not counted
        self._drain_bits = 0.0
        self._served_bits = 0.0  # per draining transfer, since the start
        self._level = inf  # bandwidth of each transfer that its share limits
        self._total_bps = 0.0  # of all transfers together
        self._at_s = 0.0
        self._wake = 0  # number of the newest wake-up; older ones are ignored
        self._serial = 0
        self._reported_s = 0.0
        self._reported_bits = 0.0
        self._empty_s = events.now_s  # time of the last report without a backlog

    # Transfers ------------------------------------------------------------------------------------

    def produce(self, bits: float, seconds: float, done: Callable[[], None]) -> LinkTransfer:
        """A prefill begins: `bits` become ready evenly over `seconds`."""
        transfer = LinkTransfer(done)
        transfer.rate_bps = bits / seconds if seconds > 0 else 0.0
        self._advance()
        self._add_clear(transfer)
        self._share()
        return transfer

    def drain(self, transfer: LinkTransfer, closing_bits: float) -> None:
        """The prefill has ended: the backlog and `closing_bits` are left to send."""
        self._advance()
        self._start_draining(transfer, self._end_production(transfer) + closing_bits)
        self._share()

    def send(self, bits: float, done: Callable[[], None]) -> LinkTransfer:
        """Starts a transfer whose bits are all ready, such as a copy of a cached prefix."""
        transfer = LinkTransfer(done)
        self._advance()
        self._start_draining(transfer, bits)
        self._share()
        return transfer

    def cancel(self, transfer: LinkTransfer) -> None:
        if transfer.ended:
            return
        self._advance()
        transfer.ended = True
        if transfer.serial is not None or transfer.slot is not None:
            self._end_production(transfer)
        else:
            self._drain_count -= 1
            self._drain_bits -= transfer.finish_at - self._served_bits
        self._share()

    def set_bps(self, bps: float) -> None:
        self._advance()
        self.bps = bps
        self._share()

    # Queries --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._clear and not self._backlogged and not self._drain_count

    def report(self, peer: str, rtt_s: float) -> LinkStats:
        """Statistics since the last report. A link without bandwidth has lost its connections."""
        self._advance()
        now = self._events.now_s
        elapsed = now - self._reported_s
        goodput = (self.total_bits - self._reported_bits) / elapsed if elapsed > 0 else 0.0
        self._reported_s, self._reported_bits = now, self.total_bits
        backlog_bits = self._drain_bits + self._backlogs.total_bits()
        waiting = backlog_bits > self._least_bits
        waited_s = 0.0
        if waiting:
            # The oldest bit has waited at most as long as the backlog takes to send, and at most
            # since the last report without a backlog.
            waited_s = now - self._empty_s
            if self.bps > 0:
                waited_s = min(waited_s, backlog_bits / self.bps)
        else:
            self._empty_s = now
        return LinkStats(
            peer=peer,
            at_s=now,
            connections=1 if self.bps > 0 else 0,
            goodput_bps=goodput,
            backlog_bytes=int(backlog_bits / 8) if waiting else 0,
            in_flight_bytes=0,
            waited_s=waited_s,
            rtt_s=rtt_s,
            delivery_bps=self.bps if waited_s > STANDING_S and self.bps > 0 else None,
        )

    def settle(self) -> None:
        """Counts everything carried up to now."""
        self._advance()

    # Internals ------------------------------------------------------------------------------------

    def _start_draining(self, transfer: LinkTransfer, bits: float) -> None:
        self._serial += 1
        transfer.finish_at = self._served_bits + bits
        heappush(self._draining, (transfer.finish_at, self._serial, transfer))
        self._drain_count += 1
        self._drain_bits += bits

    def _advance(self) -> None:
        """Advances every transfer up to now, at the rates that held since the last change."""
        now = self._events.now_s
        elapsed = now - self._at_s
        if elapsed <= 0:
            return
        level = self._level
        self._backlogs.advance(elapsed, level * elapsed)
        if self._drain_count:
            self._served_bits += level * elapsed
            self._drain_bits -= level * elapsed * self._drain_count
        if self._total_bps > 0:
            self._carry(self._at_s, now)
        self._at_s = now

    def _share(self) -> None:
        """Shares the bandwidth anew, and schedules the next end of a transfer or of a backlog."""
        level = self._find_level()
        greedy = self._drain_count + len(self._backlogged)
        self._level = level
        self._total_bps = self.bps if greedy else self._clear_bps
        next_s = self._backlogs.until_empty_s(level) if self._backlogged else inf
        while self._draining and self._draining[0][2].ended:
            heappop(self._draining)
        if self._draining and level > 0:
            next_s = min(next_s, (self._draining[0][0] - self._served_bits) / level)
        self._wake += 1
        if next_s != inf:
            self._events.at(self._events.now_s + max(next_s, 0.0), self._on_wake, self._wake)

    def _find_level(self) -> float:
        """The bandwidth of each transfer that its share limits. Producing transfers change between
        clear and backlogged until all rates fit: each of these changes raises the level."""
        while True:
            greedy = self._drain_count + len(self._backlogged)
            left = self.bps - self._clear_bps
            if self._clear and self._clear[-1][0] * greedy > left:
                transfer = self._clear[-1][2]
                self._remove_clear(transfer)
                transfer.slot = self._backlogs.add(transfer.rate_bps)
                self._backlogged[transfer.slot] = transfer
                continue
            level = left / greedy if greedy else inf
            least = self._backlogs.least()
            if (
                least is None
                or self._backlogs.rate(least) > level
                or self._backlogs.bits(least) > self._least_bits
            ):
                return level
            transfer = self._backlogged[least]
            self._end_production(transfer)
            self._add_clear(transfer)

    def _add_clear(self, transfer: LinkTransfer) -> None:
        self._serial += 1
        transfer.serial = self._serial
        insort(self._clear, (transfer.rate_bps, self._serial, transfer))
        self._clear_bps += transfer.rate_bps

    def _remove_clear(self, transfer: LinkTransfer) -> None:
        assert transfer.serial is not None
        del self._clear[bisect_left(self._clear, (transfer.rate_bps, transfer.serial))]
        transfer.serial = None
        # Without a transfer the sum is exact again.
        self._clear_bps = self._clear_bps - transfer.rate_bps if self._clear else 0.0

    def _end_production(self, transfer: LinkTransfer) -> float:
        """Forgets a producing transfer. Returns its backlog."""
        if transfer.slot is None:
            self._remove_clear(transfer)
            return 0.0
        del self._backlogged[transfer.slot]
        bits = self._backlogs.remove(transfer.slot)
        transfer.slot = None
        return bits

    @property
    def _least_bits(self) -> float:
        return max(_LEAST_BITS, self.bps * _LEAST_S)

    def _on_wake(self, wake: int) -> None:
        if wake != self._wake:
            return
        self._advance()
        finished = []
        served = self._served_bits + self._least_bits
        while self._draining and (self._draining[0][2].ended or self._draining[0][0] <= served):
            transfer = heappop(self._draining)[2]
            if not transfer.ended:
                transfer.ended = True
                self._drain_count -= 1
                self._drain_bits -= transfer.finish_at - self._served_bits
                finished.append(transfer)
        if not self._drain_count:
            self._drain_bits = self._served_bits = 0.0  # small numbers are more exact
            self._draining.clear()
        self._share()
        for transfer in finished:
            transfer.done()

    def _carry(self, start_s: float, end_s: float) -> None:
        bits = self.carried_bits
        width = self._bin_s
        first, last = int(start_s / width), int(end_s / width)
        if len(bits) <= last:
            bits.extend([0.0] * (last + 1 - len(bits)))
        rate = self._total_bps
        self.total_bits += rate * (end_s - start_s)
        if first == last:
            bits[first] += rate * (end_s - start_s)
            return
        bits[first] += rate * ((first + 1) * width - start_s)
        for whole in range(first + 1, last):
            bits[whole] += rate * width
        bits[last] += rate * (end_s - last * width)
