"""Which blocks of vLLM hold a range of tokens, and the segments of the kvd that they become.

A layout has one entry per vLLM group and group of the spec that meet: vLLM groups layers by the
shape of their pages, the spec by what they cache. `native_layout.py` and `canonical_layout.py` make
the two layouts; everything that decides what to copy and when works with either of them.

Pure. Independent of kvd, tensors and requests. Paper, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from prfaas.errors import EngineError
from prfaas.kvspec import Group, KVSpec, Segment, SlidingWindow

Kind: TypeAlias = Literal["full", "window", "state"]
BlockTables: TypeAlias = Sequence[Sequence[int]]  # vLLM's, by its group number


class Move(NamedTuple):
    """Tokens of one group to copy between an engine and its kvd, for all layers. `block_ids` are
    the blocks from the one with token `start` to the one with the last token."""

    group: int  # position in the layout's groups
    start: int  # tokens; 0 for a state
    stop: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    index: int  # vLLM's group number: its place in block tables
    kind: Kind
    spec: Group
    block_tokens: int  # of vLLM's blocks
    # vLLM's name of each layer that this worker has, and its number in the spec.
    layers: tuple[tuple[str, int], ...]
    positional_states: bool = False  # the state's place in the block table depends on the length
    writes: bool = True  # whether this worker saves the group: of equal copies one is saved

    def first_token(self, tokens: int) -> int:
        """The oldest token needed to continue after `tokens` tokens."""
        return self.spec.first_token(tokens) if isinstance(self.spec, SlidingWindow) else 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[CacheGroup, ...]
    spec: KVSpec
    block_tokens: int  # the blocks that hashes name
    whole: int  # copies begin and end at multiples of this many tokens

    def round_down(self, tokens: int) -> int:
        return tokens // self.whole * self.whole

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.whole) * self.whole

    def of_kind(self, kind: Kind) -> list[int]:
        """Positions of the groups of that kind."""
        return [at for at, group in enumerate(self.groups) if group.kind == kind]

    def can_resume_at(self, tokens: int) -> bool:
        """Whether a prefill of this engine can begin after `tokens` tokens. vLLM computes on from a
        state in the middle of a block only where states have no place of their own."""
        return all(
            tokens % group.block_tokens == 0 for group in self.groups if group.positional_states
        )

    def move(self, position: int, start: int, stop: int, tables: BlockTables) -> Move:
        """Tokens [start, stop) of a growing or window group. EngineError when vLLM has freed one of
        their blocks: its null block is number 0."""
        group = self.groups[position]
        first, last = start // group.block_tokens, -(-stop // group.block_tokens)
        ids = tuple(tables[group.index][first:last])
        if len(ids) != last - first or not all(ids):
            raise EngineError(f"{group.spec.name}: some of blocks {first} to {last} are missing")
        return Move(position, start, stop, ids)

    def state_move(self, position: int, tokens: int, tables: BlockTables) -> Move:
        """The move of the running state when exactly `tokens` tokens are computed."""
        group = self.groups[position]
        table = tables[group.index]
        place = (tokens - 1) // group.block_tokens if group.positional_states else 0
        if place >= len(table) or not table[place]:
            raise EngineError(f"{group.spec.name}: the state after {tokens} tokens is missing")
        return Move(position, 0, tokens, (table[place],))

    def segments(self, move: Move) -> list[tuple[str, Segment]]:
        """The segments of a move that this worker's layers write or read."""
        group = self.groups[move.group]
        return [
            (name, Segment(group.spec.name, number, move.start, move.stop))
            for name, number in group.layers
        ]
