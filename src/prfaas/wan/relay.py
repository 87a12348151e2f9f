"""A user-space relay that imposes a WAN on TCP connections: rate, delay, jitter, stalls, outages,
cut connections, damaged bytes. No root needed.

    client ── kernel ──► Lane 0 ──► delay ──► kernel ── target
           ◄── kernel ── delay ◄── Lane 1 ◄── kernel ──

One thread and one loop move all bytes. The relay does not read a full lane or a full connection, so
the sender has to wait. The relay cannot emulate packet loss: each of its hops is a loss-free TCP
connection (`testing.lossy_net` has real packets).
"""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address
from prfaas.wan.acceptor import Acceptor
from prfaas.wan.commands import LoopCommands
from prfaas.wan.forwarder import Forwarder
from prfaas.wan.path import Conditions, EmulatedPath, PathState
from prfaas.wan.stats import LatenessCounter, RelayStats

# Bounds every wait, so that a missed wake-up cannot stop the relay.
_LONGEST_WAIT_S = 1.0
_CONTROL_TIMEOUT_S = 10.0


class Relay:
    """Listens as soon as it is built, and moves bytes while `run` runs, or between `start` and
    `close`. Any thread may call `change`, `stall`, `outage`, `restore`, `cut` and `damage`; they
    return when the change is in force. Further pairs of addresses (`also`) share the first pair's
    rate: one path between several hosts."""

    def __init__(
        self,
        listen: Address,
        target: Address,
        conditions: Conditions,
        *,
        also: Sequence[tuple[Address, Address]] = (),
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._selector = selectors.DefaultSelector()
        self._path = EmulatedPath(conditions, seed, self._clock.now())
        self._forwarder = Forwarder(self._selector, self._path, self._clock)
        routes = ((listen, target), *also)
        self._acceptor = Acceptor(routes, self._selector, self._forwarder, self._clock)
        self._commands = LoopCommands(self._selector)
        self.addresses = self._acceptor.addresses
        self.address = self.addresses[0]
        self._wakeup_lateness = LatenessCounter()
        self._stopping = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._acceptor.open_listeners()

    # Control ---------------------------------------------------------------------------------

    def change(self, conditions: Conditions) -> None:
        """Bytes on their way keep their time of departure. The schedule of faults starts again."""

        def apply() -> None:
            now_s = self._clock.now()
            self._path.change(conditions, now_s)
            self._forwarder.apply_limits()
            self._follow_schedule(now_s)

        self._run_in_loop(apply)

    def stall(self) -> None:
        """Nothing moves until `restore`; connections stay."""
        self._set_manual_state(PathState.STALLED)

    def outage(self) -> None:
        """Nothing moves until `restore`; new connections are refused."""
        self._set_manual_state(PathState.OUT)

    def restore(self) -> None:
        self._set_manual_state(PathState.UP)

    def cut(self) -> None:
        """Resets every connection on both sides. The bytes on the path are lost."""
        self._run_in_loop(self._forwarder.drop_all)

    def damage(self, chunks: int) -> None:
        """Flips one bit in each of the next `chunks` large chunks for the target."""

        def apply() -> None:
            self._forwarder.chunks_to_damage = chunks

        self._run_in_loop(apply)

    @property
    def conditions(self) -> Conditions:
        return self._path.conditions

    @property
    def stats(self) -> RelayStats:
        forwarder, acceptor = self._forwarder, self._acceptor
        return RelayStats(
            connections=len(forwarder.connections),
            accepted=acceptor.accepted,
            refused=acceptor.refused,
            to_target_bytes=forwarder.forwarded_bytes[0],
            to_client_bytes=forwarder.forwarded_bytes[1],
            held_bytes=forwarder.held_bytes,
            held_peak_bytes=forwarder.held_peak_bytes,
            damaged=forwarder.damaged_chunks,
            forwards=forwarder.forward_lateness.count,
            forward_late_s=forwarder.forward_lateness.total_s,
            forward_late_peak_s=forwarder.forward_lateness.peak_s,
            wakeups=self._wakeup_lateness.count,
            wakeup_late_s=self._wakeup_lateness.total_s,
            wakeup_late_peak_s=self._wakeup_lateness.peak_s,
        )

    def start(self) -> Relay:
        self._thread = threading.Thread(target=self.run, name=f"wan {self.address}", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Makes `run` end soon. Signal handlers and other threads may call it."""
        self._stopping = True
        self._commands.wake_loop()

    def close(self) -> None:
        """Ends the loop and resets open connections. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_CONTROL_TIMEOUT_S)
            assert not self._thread.is_alive(), "the relay's loop does not end"
            self._thread = None
        if self._closed:
            return
        self._closed = True
        self._forwarder.drop_all()
        self._acceptor.close()
        self._commands.close()
        self._forwarder.close()
        self._selector.close()

    def __enter__(self) -> Relay:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        forwarder = self._forwarder
        return (
            f"<Relay {self.address} {self._path.state.name.lower()}, "
            f"{len(forwarder.connections)} connections, {forwarder.held_bytes} bytes on the path>"
        )

    # The loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Moves bytes until `stop`."""
        clock, path, forwarder = self._clock, self._path, self._forwarder
        while not self._stopping:
            now_s = clock.now()
            self._follow_schedule(now_s)
            path_s = path.clock.read(now_s)
            moving = path.state is PathState.UP
            for direction in (0, 1):
                if moving:
                    forwarder.read_sources(direction, path_s)
                    forwarder.write_due(direction, path_s)
                room = moving and path.lanes[direction].wait_s(path_s) == 0.0
                forwarder.watch_sources(direction, room)
            wait_s = min(_LONGEST_WAIT_S, path.until_change_s(now_s))
            if moving:
                wait_s = min(wait_s, forwarder.until_due_s(path_s))
            for key, _ in self._select(max(0.0, wait_s)):
                # An earlier handler of this round may have closed the socket of a later one.
                if key.fd in self._selector.get_map():
                    key.data()

    def _select(self, wait_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        until_s = self._clock.now() + wait_s
        found = self._selector.select(wait_s)
        if not found:
            self._wakeup_lateness.add(self._clock.now() - until_s)
        return found

    def _follow_schedule(self, now_s: float) -> None:
        """Applies the cuts and the changes of the path's state that are due."""
        if self._path.take_due_cut(now_s):
            self._forwarder.drop_all()
        self._acceptor.refuse_overdue(now_s)
        if self._path.update_state(now_s):
            if self._path.state is PathState.OUT:
                self._acceptor.accept_waiting()
                self._acceptor.close_listeners()
            else:
                self._acceptor.open_listeners()

    def _set_manual_state(self, state: PathState) -> None:
        def apply() -> None:
            self._path.manual_state = state
            self._follow_schedule(self._clock.now())

        self._run_in_loop(apply)

    def _run_in_loop(self, action: Callable[[], None]) -> None:
        if not self._commands.run(action, _CONTROL_TIMEOUT_S):
            raise TimeoutError(f"{self!r} did not run a command: is its loop running?")


def describe(conditions: Conditions) -> str:
    """`1 Gbit/s, 60 ms round trip, stalls 1 s every 10 s`."""
    rate = conditions.rate_bps
    parts = [
        "no rate limit" if rate is None else f"{rate / 1e9:g} Gbit/s",
        f"{conditions.rtt_s * 1e3:g} ms round trip",
    ]
    if conditions.jitter_s:
        parts.append(f"up to {conditions.jitter_s * 1e3:g} ms jitter")
    for name, fault in (("stalls", conditions.stall), ("outages", conditions.outage)):
        if fault:
            parts.append(f"{name} {fault.for_s:g} s every {fault.every_s:g} s")
    if conditions.cut_every_s is not None:
        parts.append(f"cuts every {conditions.cut_every_s:g} s")
    return ", ".join(parts)
