"""Which units a prefill fills: pure arithmetic over lengths.

A unit is one logical block of a group, or one linear state. Its key is (group index, block number),
for a linear state (group index, length in tokens after which it was saved).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.cache.groups import GroupRule

UnitKey: TypeAlias = tuple[int, int]


class Unit(NamedTuple):
    key: UnitKey
    filled_from: int  # leading tokens that the block will lack


def growing_units(
    rules: Sequence[GroupRule], block_tokens: int, runs: Mapping[int, int], tokens: int
) -> Iterator[Unit]:
    """Full-attention blocks up to `tokens`, a partial last one included, that are not in the
    group's run of `runs[group]` blocks."""
    for group, run in runs.items():
        assert rules[group].kind == "full"
        for block in range(run, -(-tokens // block_tokens)):
            yield Unit((group, block), 0)


def closing_units(rules: Sequence[GroupRule], block_tokens: int, length: int) -> Iterator[Unit]:
    """The units of states and windows after exactly `length` tokens."""
    for group, rule in enumerate(rules):
        if rule.kind == "linear":
            yield Unit((group, length), 0)
        elif rule.kind == "window":
            first = max(0, length - (rule.window_tokens - 1))
            for block in range(first // block_tokens, -(-length // block_tokens)):
                if first < length:
                    yield Unit((group, block), max(0, first - block * block_tokens))


class Demand:
    """The units of one reservation. A unit needed for two lengths is kept in its fuller form."""

    __slots__ = ("promotable", "units")

    def __init__(self) -> None:
        self.units: dict[UnitKey, int] = {}  # -> filled_from
        self.promotable: set[UnitKey] = set()

    def add(self, units: Iterable[Unit], *, keep: bool = False, keep_before: int = 0) -> None:
        """Adds units. With `keep` they become prefix units on commit; with `keep_before` only those
        of the first `keep_before` blocks do."""
        for key, filled_from in units:
            self.units[key] = min(filled_from, self.units.get(key, filled_from))
            if keep or key[1] < keep_before:
                self.promotable.add(key)


def demand_of(
    rules: Sequence[GroupRule],
    block_tokens: int,
    tokens: int,
    hit_blocks: int,
    runs: Mapping[int, int],
    firm: Iterable[int],
) -> Demand:
    """What a prefill up to `tokens` adds to a hit and its runs, with the checkpoints `firm`, which
    are lengths in blocks."""
    demand = Demand()
    growing = growing_units(rules, block_tokens, runs, tokens)
    demand.add(growing, keep_before=tokens // block_tokens)
    if tokens > hit_blocks * block_tokens:
        demand.add(closing_units(rules, block_tokens, tokens))  # the hand-off itself
    for length in firm:
        demand.add(closing_units(rules, block_tokens, length * block_tokens), keep=True)
    return demand
