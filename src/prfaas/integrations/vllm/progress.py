"""The native blocks to save after each step of a prefill, and those a resumed request loads.

    full attention   every block when it is full; the last one, full or not, with the last token
    windows          the blocks needed to continue after each length that is kept
    linear states    at exactly those lengths, after everything else of the step

A block is saved once: a saved block may already have been sent, and a preempted request computes it
again. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from prfaas.errors import EngineError
from prfaas.integrations.vllm.layout import Move, NativeGroup, NativeLayout

BlockTables: TypeAlias = Sequence[Sequence[int]]  # vLLM's, by its group number


class PrefillProgress:
    """One prefill up to `tokens`, of which the kvd already has the first `match_tokens`."""

    def __init__(
        self,
        layout: NativeLayout,
        tokens: int,
        *,
        match_tokens: int = 0,
        skip_tokens: Mapping[str, int],
        checkpoint_tokens: Iterable[int] = (),
    ) -> None:
        self.tokens = tokens
        self._layout = layout
        self._next_block = {
            group.index: skip_tokens.get(group.spec.name, 0) // layout.block_tokens
            for group in layout.groups
            if group.kind == "full"
        }
        ends = set() if match_tokens == tokens else {tokens}
        self._lengths = sorted({*checkpoint_tokens, *ends})
        self._windows: set[tuple[int, int]] = set()  # (group, block) already saved

    def step(self, start: int, stop: int, tables: BlockTables) -> tuple[Move, ...]:
        """The moves to make when the tokens [start, stop) have been computed."""
        moves = self._growing(stop, tables)
        while self._lengths and self._lengths[0] <= stop:
            length = self._lengths.pop(0)
            moves += self._closing(length, start, stop, tables)
        return tuple(moves)

    def _growing(self, stop: int, tables: BlockTables) -> list[Move]:
        moves: list[Move] = []
        whole = stop // self._layout.block_tokens
        last = self._layout.blocks(self.tokens) if stop >= self.tokens else whole
        for index, first in self._next_block.items():
            if first < last:
                group = self._layout.of(index)
                moves.append(self._layout.move(group, first, last, tables[index]))
                self._next_block[index] = last
        return moves

    def _closing(self, length: int, start: int, stop: int, tables: BlockTables) -> list[Move]:
        moves: list[Move] = []
        for group in self._layout.groups:
            if group.kind == "window":
                first = group.first_block(length, self._layout.block_tokens)
                for block in range(first, self._layout.blocks(length)):
                    if (group.index, block) not in self._windows:
                        self._windows.add((group.index, block))
                        moves.append(
                            self._layout.move(group, block, block + 1, tables[group.index])
                        )
        for group in self._layout.groups:
            if group.kind == "state":
                # A hit's state stays next to the running one where places depend on the length.
                if length != stop and not (length == start and group.positional_states):
                    raise EngineError(
                        f"the state after {length} tokens was not kept: the step went from "
                        f"{start} to {stop}"
                    )
                moves.append(self._layout.state_move(group, length, tables[group.index]))
        return moves


def moves_to_load(
    layout: NativeLayout, tokens: int, computed_tokens: int, tables: BlockTables
) -> tuple[Move, ...]:
    """The moves that a request needs to continue after `tokens` tokens when vLLM's cache has the
    first `computed_tokens`. Other requests share those blocks, so the load does not touch them."""
    have = computed_tokens // layout.block_tokens
    last = layout.blocks(tokens)

    def move(group: NativeGroup) -> Iterable[Move]:
        table = tables[group.index]
        if group.kind == "state":
            yield layout.state_move(group, tokens, table)
            return
        first = max(have, group.first_block(tokens, layout.block_tokens))
        if first < last:
            yield layout.move(group, first, last, table)

    return tuple(one for group in layout.groups for one in move(group))
