"""Backlogs that are all served at the same rate, each fed at its own: which one is empty first?

The served bits are one counter F for all, so a backlog is the height of its line above F:

    bits(t) = rate * t + start - F(t)

A kinetic tournament finds the lowest line. Each match of the tournament notes until when its winner
stays the lower one, and is played again only after that time. So a change costs a logarithm of the
number of backlogs, and so does a question, on average. This module does not know links or
transfers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

_NONE = -1
# Lines closer than this (in bits) are at the same height, and the one with the lower rate wins.
# Otherwise, rounding could let two lines cross again and again at one time.
_SAME_BITS = 1.0


class Backlogs:
    """A backlog is named by its slot, which `add` returns."""

    def __init__(self) -> None:
        self._at_s = 0.0  # since the first backlog began
        self._served_bits = 0.0  # since then, to each backlog
        self._rates: list[float] = [0.0]
        self._starts: list[float] = [0.0]
        self._free = [0]  # slots
        self._sorted: list[float] = []  # the rates of all backlogs
        # A tree: match k is between the winners of 2 k and 2 k + 1, and slot s is entry size + s.
        self._winners = [_NONE, _NONE]
        self._until_s = [inf, inf]

    def __len__(self) -> int:
        return len(self._sorted)

    def advance(self, elapsed_s: float, served_bits: float) -> None:
        """Time passes, in which each backlog is served so many bits."""
        if self._sorted:
            self._at_s += elapsed_s
            self._served_bits += served_bits

    def add(self, rate_bps: float) -> int:
        """A new backlog, which has no bits yet."""
        if not self._sorted:
            self._at_s = self._served_bits = 0.0  # small numbers are more exact
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._rates[slot] = rate_bps
        self._starts[slot] = self._served_bits - rate_bps * self._at_s
        insort(self._sorted, rate_bps)
        self._enter(slot, slot)
        return slot

    def remove(self, slot: int) -> float:
        """Removes a backlog. Returns its bits."""
        bits = self.bits(slot)
        del self._sorted[bisect_left(self._sorted, self._rates[slot])]
        self._enter(slot, _NONE)
        self._free.append(slot)
        return bits

    def bits(self, slot: int) -> float:
        bits = self._rates[slot] * self._at_s + self._starts[slot] - self._served_bits
        return bits if bits > 0 else 0.0

    def rate(self, slot: int) -> float:
        return self._rates[slot]

    def least(self) -> int | None:
        """The slot of the smallest backlog; None if there is none."""
        if not self._sorted:
            return None
        self._replay(1)
        return self._winners[1]

    def total_bits(self) -> float:
        return sum(self.bits(slot) for slot in self._winners[len(self._rates) :] if slot >= 0)

    def until_empty_s(self, level_bps: float) -> float:
        """Seconds until a backlog is empty, if all are served at this rate, or a shorter time after
        which the question has to be asked again. Infinite: none gets empty."""
        least = self.least()
        if least is None or self._sorted[0] >= level_bps:
            return inf
        bits, rate = self.bits(least), self._rates[least]
        empty_s = bits / (level_bps - rate) if rate < level_bps else inf
        # Another backlog can be the first only after it has become the smallest one. None is
        # smaller now than `bits`, and none shrinks faster than the one with the lowest rate.
        soonest_s = bits / (level_bps - self._sorted[0])
        return min(empty_s, max(soonest_s, self._until_s[1] - self._at_s))

    # The tournament -------------------------------------------------------------------------------

    def _enter(self, slot: int, winner: int) -> None:
        place = len(self._rates) + slot
        self._winners[place] = winner
        place //= 2
        while place:
            self._play(place)
            place //= 2

    def _replay(self, place: int) -> None:
        """Plays the matches again whose winners may have changed by now."""
        if self._until_s[place] > self._at_s:
            return
        if 2 * place < len(self._rates):
            self._replay(2 * place)
            self._replay(2 * place + 1)
        self._play(place)

    def _play(self, place: int) -> None:
        winners, until = self._winners, self._until_s
        one, other = winners[2 * place], winners[2 * place + 1]
        until_s = min(until[2 * place], until[2 * place + 1])
        if one < 0 or other < 0:
            winners[place] = max(one, other)
            until[place] = until_s
            return
        now = self._at_s
        ahead = (self._rates[other] - self._rates[one]) * now
        ahead += self._starts[other] - self._starts[one]
        faster = self._rates[one] > self._rates[other]
        if ahead < -_SAME_BITS or (ahead <= _SAME_BITS and faster):
            one, other, ahead = other, one, -ahead
        winners[place] = one
        closing_bps = self._rates[one] - self._rates[other]
        if closing_bps > 0:
            until_s = min(until_s, now + ahead / closing_bps)
        until[place] = until_s

    def _grow(self) -> None:
        size = len(self._rates)
        self._free = list(range(size, 2 * size))
        self._rates += [0.0] * size
        self._starts += [0.0] * size
        self._winners = [_NONE] * (2 * size) + self._winners[size:] + [_NONE] * size
        self._until_s = [inf] * (4 * size)
        for place in range(2 * size - 1, 0, -1):
            self._play(place)
