"""A link shares its bandwidth as a look at every transfer would."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest

from prfaas.sim.events import Events
from prfaas.sim.network.backlogs import Backlogs
from prfaas.sim.network.links import FluidLink
from tests.sim.network.plain_link import PlainLink

BPS = 1e9


class Traffic:
    """Prefills that overlap, with a mean total rate of `load` times the bandwidth. Some are
    cancelled, and the bandwidth changes."""

    def __init__(self, link: Any, events: Events, producers: int, load: float, seed: int) -> None:
        self._link, self._events = link, events
        self.done: dict[int, float] = {}
        self.backlogs: list[float] = []
        draw = Random(seed)
        at_s = 0.0
        for number in range(4 * producers):
            seconds = draw.lognormvariate(0.0, 0.7)
            bits = BPS * load / producers * draw.lognormvariate(0.0, 0.7) * seconds
            closing, cancelled = bits * draw.random() / 10, draw.random() < 0.03
            events.at(at_s, self._start, (number, seconds, bits, closing, cancelled))
            if draw.random() < 0.05:
                events.at(at_s, link.set_bps, BPS * draw.choice([0.0, 0.3, 1.0, 1.5]))
            if draw.random() < 0.1:
                events.at(at_s, self._look)
            at_s += draw.expovariate(producers)
        events.at(at_s, link.set_bps, BPS)
        events.run_before(inf)

    def _start(self, drawn: tuple[int, float, float, float, bool]) -> None:
        number, seconds, bits, closing, cancelled = drawn
        now_s = self._events.now_s

        def finish() -> None:
            self.done[number] = self._events.now_s

        transfer = self._link.produce(bits, seconds, finish)
        if cancelled:
            self._events.at(now_s + seconds / 2, lambda _: self._link.cancel(transfer))
        else:
            self._events.at(now_s + seconds, lambda _: self._link.drain(transfer, closing))

    def _look(self, _: object) -> None:
        if isinstance(self._link, FluidLink):
            self.backlogs.append(self._link.report("", 0.0).backlog_bytes * 8)
        else:
            self.backlogs.append(self._link.backlog_bits())


@pytest.mark.parametrize("load", [0.5, 0.95, 1.2, 3.0])
@pytest.mark.parametrize("producers", [2, 40])
def test_transfers_end_when_they_would_plainly(producers: int, load: float) -> None:
    for seed in range(2):
        events, plain_events = Events(), Events()
        link, plain_link = FluidLink(events, BPS, 1.0), PlainLink(plain_events, BPS)
        found = Traffic(link, events, producers, load, seed)
        plain = Traffic(plain_link, plain_events, producers, load, seed)
        assert link.idle
        # Both ignore a hundred bits, but not at the same times.
        assert found.done == pytest.approx(plain.done, abs=1e-4)
        assert found.backlogs == pytest.approx(plain.backlogs, rel=1e-4, abs=1e5)


def test_backlogs_know_the_smallest() -> None:
    draw = Random(0)
    backlogs = Backlogs()
    known: dict[int, tuple[float, float]] = {}  # slot: rate, bits
    for _ in range(2000):
        if known and draw.random() < 0.45:
            slot = draw.choice(list(known))
            assert backlogs.remove(slot) == pytest.approx(known.pop(slot)[1], abs=1.0)
        else:
            rate = draw.choice([0.0, 1e3, draw.uniform(0, 1e6)])
            known[backlogs.add(rate)] = (rate, 0.0)
        # As a link does: at most until the first backlog is empty, or the answer may change.
        level = draw.uniform(0, 1.2e6)
        elapsed_s = min(draw.expovariate(1.0), backlogs.until_empty_s(level))
        shrinking = [bits / (level - rate) for rate, bits in known.values() if rate < level]
        assert elapsed_s <= min(shrinking, default=inf) + 1e-4
        backlogs.advance(elapsed_s, level * elapsed_s)
        for slot, (rate, bits) in known.items():
            known[slot] = (rate, max(0.0, bits + (rate - level) * elapsed_s))
        least = backlogs.least()
        assert (least is None) == (not known) and len(backlogs) == len(known)
        if least is not None:
            assert known[least][1] == pytest.approx(min(b for _, b in known.values()), abs=10.0)
            total = sum(bits for _, bits in known.values())
            assert backlogs.total_bits() == pytest.approx(total, rel=1e-6, abs=100.0)
        for slot in [slot for slot, (_, bits) in known.items() if bits < 1.0]:
            backlogs.remove(slot)  # as a link does: it has become clear
            del known[slot]
