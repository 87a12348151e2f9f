"""Nodes in ascending order of one key, such as the time at which a node is free.

A node is a small number, and a set of nodes is an integer with the bits of its numbers. The entries
are in blocks of bounded size, and every block has the set of its nodes:

    block 0: (1.5, 7) (2.0, 3)     block 1: (2.0, 9) (4.5, 0)     entries: key, number
    set:     bits 3, 7             set:     bits 0, 9

So the first node of a given set is found with one AND per block, and a change costs two binary
searches. Among equal keys the lower number comes first. This module does not know what the keys
mean.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from math import inf
from typing import TypeAlias

MAX_BLOCK = 32


Ranked: TypeAlias = tuple[float, int]  # key, number: no named tuple, because there are millions


def lowest(nodes: int) -> int:
    """The lowest number in a set that is not empty."""
    return (nodes & -nodes).bit_length() - 1


class Ranking:
    __slots__ = ("_at_most", "_blocks", "_keys", "_lasts", "_sets", "nodes")

    def __init__(self, entries: Iterable[Ranked] = ()) -> None:
        ordered = sorted(entries)
        self._keys: dict[int, float] = {number: key for key, number in ordered}
        size = MAX_BLOCK * 3 // 4  # with room for more
        self._blocks = [ordered[at : at + size] for at in range(0, len(ordered), size)]
        self._lasts = [block[-1] for block in self._blocks]
        self._sets = [_set_of(block) for block in self._blocks]  # the nodes of each block
        self.nodes = _set_of(ordered)  # the set of all ranked nodes
        self._at_most: tuple[float, int] | None = None  # the latest answer of `at_most`

    def __len__(self) -> int:
        return len(self._keys)

    # Changes --------------------------------------------------------------------------------------

    def put(self, number: int, key: float) -> None:
        """Adds a node, or changes its key."""
        before = self._keys.get(number)
        if before == key:
            return
        self._at_most = None
        self._keys[number] = key
        if before is not None:
            if len(self._blocks) == 1:  # the same steps, without a search for the block
                block = self._blocks[0]
                del block[bisect_left(block, (before, number))]
                insort(block, (key, number))
                self._lasts[0] = block[-1]
                return
            self._take(before, number)
        bit = 1 << number
        self.nodes |= bit
        entry = (key, number)
        lasts = self._lasts
        if not lasts:
            self._blocks.append([entry])
            lasts.append(entry)
            self._sets.append(bit)
            return
        place = bisect_left(lasts, entry)
        if place == len(lasts):
            place -= 1
            lasts[place] = entry
        block = self._blocks[place]
        insort(block, entry)
        self._sets[place] |= bit
        if len(block) > MAX_BLOCK:
            self._split(place)

    def remove(self, number: int) -> None:
        key = self._keys.pop(number, None)
        if key is not None:
            self.nodes ^= 1 << number
            self._at_most = None
            self._take(key, number)

    def _take(self, key: float, number: int) -> None:
        entry = (key, number)
        place = bisect_left(self._lasts, entry)
        block = self._blocks[place]
        del block[bisect_left(block, entry)]
        if block:
            self._lasts[place] = block[-1]
            self._sets[place] ^= 1 << number
        else:
            del self._blocks[place], self._lasts[place], self._sets[place]

    def _split(self, place: int) -> None:
        block = self._blocks[place]
        kept, moved = block[: len(block) // 2], block[len(block) // 2 :]
        self._blocks[place : place + 1] = [kept, moved]
        self._lasts[place : place + 1] = [kept[-1], moved[-1]]
        self._sets[place : place + 1] = [_set_of(kept), _set_of(moved)]

    # Queries --------------------------------------------------------------------------------------

    def key(self, number: int) -> float:
        return self._keys[number]

    def least(self) -> Ranked:
        """The first node of all. There must be one."""
        return self._blocks[0][0]

    def first(self, nodes: int) -> Ranked | None:
        """The first node of a set; None if no node of the set is ranked."""
        for place, held in enumerate(self._sets):
            found = held & nodes
            if not found:
                continue
            for entry in self._blocks[place]:
                if found >> entry[1] & 1:
                    return entry
        return None

    def at_most(self, key: float) -> int:
        """The set of nodes whose key is not above this one."""
        known = self._at_most
        if known is not None and known[0] == key:
            return known[1]
        place = bisect_left(self._lasts, (key, inf))
        nodes = 0
        for held in self._sets[:place]:
            nodes |= held
        if place < len(self._blocks):
            block = self._blocks[place]
            nodes |= _set_of(block[: bisect_right(block, (key, inf))])
        self._at_most = (key, nodes)
        return nodes

    def check(self) -> None:
        """Raises AssertionError where the blocks, their sets and the keys do not agree."""
        entries = [entry for block in self._blocks for entry in block]
        assert entries == sorted((key, number) for number, key in self._keys.items())
        assert all(0 < len(block) <= MAX_BLOCK for block in self._blocks)
        assert self._lasts == [block[-1] for block in self._blocks]
        assert self._sets == [_set_of(block) for block in self._blocks]
        assert self.nodes == _set_of(entries)


def _set_of(entries: list[Ranked]) -> int:
    nodes = 0
    for _, number in entries:
        nodes |= 1 << number
    return nodes
