"""At which lengths the state of a running request is copied, so that its answer can be kept.

Full attention stays in vLLM's blocks until a request has ended. Linear states change with every
token, and vLLM frees the blocks of a window that decoding has left: both are copied to a slot in
the step that reaches a boundary, over the copy of the boundary before. Only the last boundary
counts, because a conversation continues at its end.

    keep_interval   the distance of boundaries: whole blocks of the wire; for models with states
                    also whole blocks of vLLM, where alone a prefill can resume
    count_slots     requests whose copies fit into the memory that is set aside

Pure.
"""

from __future__ import annotations

import math
from typing import Final

from prfaas.integrations.vllm.caches.groups import BlockTables, CacheGroup, CacheLayout, Move
from prfaas.kvspec import FullAttention, LinearState

SLOT_MEMORY_BYTES = 1 << 30  # of all slots of a form, on all ranks together


def keep_interval(layout: CacheLayout) -> int:
    sizes = [layout.block_tokens]
    if layout.of_kind("state"):
        sizes += [
            group.block_tokens
            for group in layout.groups
            if group.kind == "full" or group.positional_states
        ]
    return math.lcm(*sizes)


def needs_slots(layout: CacheLayout) -> bool:
    return any(not isinstance(group, FullAttention) for group in layout.spec.groups)


def slot_blocks(layout: CacheLayout, group: CacheGroup) -> int:
    """vLLM's blocks of a group that one slot holds."""
    if group.kind == "state":
        return 1
    tokens = group.spec.window + layout.whole  # type: ignore[union-attr]
    return -(-tokens // group.block_tokens) + 1


def count_slots(layout: CacheLayout, most: int, memory_bytes: int = SLOT_MEMORY_BYTES) -> int:
    """At most `most`. The same in every process of an engine: it depends on the model and on vLLM's
    block sizes alone."""
    block_tokens = max((group.block_tokens for group in layout.groups), default=1)
    needed = 0
    for group in layout.spec.groups:
        if isinstance(group, LinearState):
            needed += len(group.layers) * group.state_bytes
        elif not isinstance(group, FullAttention):
            tokens = group.window + layout.whole + 2 * block_tokens
            needed += len(group.layers) * group.bytes_per_token * tokens
    return min(most, memory_bytes // needed) if needed else 0


class Boundaries:
    """One request from its first step on."""

    def __init__(self, layout: CacheLayout, prompt_tokens: int) -> None:
        self._layout = layout
        self._interval: Final = keep_interval(layout)
        self._first: Final = prompt_tokens // self._interval * self._interval
        self._prompt_tokens: Final = prompt_tokens
        self._computed = 0
        self._copied: tuple[int, tuple[Move, ...]] = (0, ())
        self.lost = False  # nothing of this request is kept

    def step(self, start: int, stop: int) -> bool:
        """Whether the step that computes the tokens [start, stop) ends at a boundary whose states
        and windows `copy` must take. Loses a request that is computed again after a preemption, or
        that decodes several tokens in one step: not all of them may stay."""
        if start < self._computed or (start >= self._prompt_tokens and stop - start > 1):
            self.lost = True
        self._computed = stop
        # Boundaries before the prompt's last one are replaced in any case.
        return not self.lost and stop >= max(self._first, 1) and stop % self._interval == 0

    def copy(self, tables: BlockTables) -> tuple[Move, ...]:
        """The moves of states and windows at the end of the step. EngineError when vLLM has freed
        one of their blocks."""
        layout, length = self._layout, self._computed
        moves: list[Move] = []
        for at, group in enumerate(layout.groups):
            if group.kind == "state":
                moves.append(layout.state_move(at, length, tables))
            elif group.kind == "window":
                first = layout.round_down(group.first_token(length))
                moves.append(layout.move(at, first, length, tables))
        self._copied = (length, tuple(moves))
        return tuple(moves)

    def last(self, known_tokens: int) -> tuple[int, tuple[Move, ...]]:
        """The length up to which the request can be kept, and the moves of `copy` there. 0: nothing
        can be kept. `known_tokens`: tokens of prompt and answer whose ids are known. A step that is
        still running may have computed one more."""
        if self.lost:
            return 0, ()
        if needs_slots(self._layout):
            length, moves = self._copied
            return (length, moves) if length <= known_tokens else (0, ())
        return min(self._computed, known_tokens) // self._interval * self._interval, ()

    def attention(self, length: int, skip: dict[str, int], tables: BlockTables) -> tuple[Move, ...]:
        """The moves of full attention up to `length` that the pool lacks: it has the first `skip`
        tokens of each group."""
        layout = self._layout
        moves: list[Move] = []
        for at in layout.of_kind("full"):
            first = layout.round_down(skip.get(layout.groups[at].spec.name, 0))
            if first < length:
                moves.append(layout.move(at, first, length, tables))
        return tuple(moves)
