"""The match rule of each kind of state, and the hit of a whole model (paper, section 3.2).

To resume a prompt after L blocks an engine needs, from each group,

    full attention   blocks 0 .. L-1            KV of every token
    sliding window   the last blocks up to L-1  KV of the last window - 1 tokens
    linear state     the state saved after L    nothing before it helps, nothing after it fits

and the hit is the longest L that *every* group can serve. A linear state after block i is filed
under block i, so that one index means "ends where block i ends" in every group.

A window rarely starts at a block's first token, and its oldest block may have been saved without
the tokens before the window. So `has(block, unneeded)` means: the group holds every token of that
block, except perhaps the first `unneeded`. Independent of pages, hashes and nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from prfaas.kvspec import FullAttention, Group, KVSpec, LinearState, SlidingWindow, block_bytes

Kind: TypeAlias = Literal["full", "window", "linear"]
Has: TypeAlias = Callable[[int, int], bool]  # block, leading tokens of it that are not needed
GroupHas: TypeAlias = Callable[[int, int, int], bool]  # group index first


class Hit(NamedTuple):
    """A hit, in blocks. `attention` is the longest run of full-attention blocks: the hit of a cache
    that ignores states and windows."""

    blocks: int
    attention: int


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How one group is matched. `window_tokens` is the model's window, 0 for other kinds."""

    name: str
    kind: Kind
    window_tokens: int = 0

    def __post_init__(self) -> None:
        assert (self.kind == "window") == (self.window_tokens > 0), self

    @property
    def closes(self) -> bool:
        """Whether the group is needed at the resume point only, not along the whole prefix."""
        return self.kind != "full"

    def needs(self, blocks: int, block_tokens: int) -> range:
        """The blocks without which a prompt cannot resume after `blocks` blocks."""
        if self.kind == "full" or blocks == 0:
            return range(blocks)
        if self.kind == "linear":
            return range(blocks - 1, blocks)
        return range(min(self.first_token(blocks, block_tokens) // block_tokens, blocks), blocks)

    def first_token(self, blocks: int, block_tokens: int) -> int:
        """The oldest token needed to resume after `blocks` blocks (a linear state: its block's)."""
        if self.kind == "full":
            return 0
        if self.kind == "linear":
            return max(0, blocks - 1) * block_tokens
        return max(0, blocks * block_tokens - (self.window_tokens - 1))

    def longest(self, has: Has, limit: int, block_tokens: int) -> int:
        """The longest length of at most `limit` blocks that this group can serve."""
        if self.kind == "full":
            for block in range(limit):
                if not has(block, 0):
                    return block
            return limit
        length = limit
        while length > 0:
            missing = self._last_missing(has, length, block_tokens)
            if missing is None:
                return length
            # Every untried length beyond `missing` needs at least as much of that block.
            length = missing
        return 0

    def _last_missing(self, has: Has, length: int, block_tokens: int) -> int | None:
        first = self.first_token(length, block_tokens)
        for block in reversed(self.needs(length, block_tokens)):
            if not has(block, max(0, first - block * block_tokens)):
                return block
        return None


def rules_for(spec: KVSpec) -> tuple[GroupRule, ...]:
    return tuple(_rule(group) for group in spec.groups)


def hybrid_hit(rules: Sequence[GroupRule], has: GroupHas, blocks: int, block_tokens: int) -> Hit:
    """The longest length of at most `blocks` that every group serves.

    Each group in turn accepts the candidate or shortens it, until a whole round accepts. A full
    run accepts every shorter length, so the loop checks those groups once.
    """
    attention = blocks
    closing: list[tuple[GroupRule, Has]] = []
    for index, rule in enumerate(rules):
        if rule.closes:
            closing.append((rule, partial(has, index)))
        else:
            attention = rule.longest(partial(has, index), attention, block_tokens)
    length, before = attention, -1
    while length != before:
        before = length
        for rule, has_block in closing:
            length = rule.longest(has_block, length, block_tokens)
    return Hit(length, attention if len(closing) < len(rules) else length)


def unit_bytes(spec: KVSpec, block_tokens: int) -> tuple[int, ...]:
    """Bytes of one logical block (or one whole state) per group: the units that pages hold."""
    return tuple(block_bytes(group, block_tokens) for group in spec.groups)


def _rule(group: Group) -> GroupRule:
    match group:
        case FullAttention():
            return GroupRule(group.name, "full")
        case SlidingWindow():
            return GroupRule(group.name, "window", group.window)
        case LinearState():
            return GroupRule(group.name, "linear")
