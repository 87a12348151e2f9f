"""The tokens to save after each step of a prefill, and those that a resumed request loads.

    full attention   the tokens that the step has computed; in the native form every block when it
                     is full, and the last one, full or not, with the last token
    windows          the tokens needed to continue after each length that is kept
    linear states    at exactly those lengths, after everything else of the step

A token is saved once: a saved token may already have been sent, and a preempted request computes it
again. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prfaas.errors import EngineError
from prfaas.integrations.vllm.caches.groups import BlockTables, CacheLayout, Move


class PrefillProgress:
    """One prefill up to `tokens`, of which the kvd already has the first `match_tokens`."""

    def __init__(
        self,
        layout: CacheLayout,
        tokens: int,
        *,
        match_tokens: int = 0,
        skip_tokens: Mapping[str, int],
        checkpoint_tokens: Iterable[int] = (),
    ) -> None:
        self.tokens = tokens
        self._layout = layout
        # By position in the layout: the tokens before are saved, or the kvd has them.
        self._next_full = {
            at: layout.round_down(skip_tokens.get(layout.groups[at].spec.name, 0))
            for at in layout.of_kind("full")
        }
        self._next_window = dict.fromkeys(layout.of_kind("window"), 0)
        ends = set() if match_tokens == tokens else {tokens}
        self._lengths = sorted({*checkpoint_tokens, *ends})

    def step(self, start: int, stop: int, tables: BlockTables) -> tuple[Move, ...]:
        """The moves to make when the tokens [start, stop) have been computed."""
        moves = self._growing(stop, tables)
        while self._lengths and self._lengths[0] <= stop:
            length = self._lengths.pop(0)
            moves += self._closing(length, start, stop, tables)
        return tuple(moves)

    def _growing(self, stop: int, tables: BlockTables) -> list[Move]:
        layout = self._layout
        moves: list[Move] = []
        last = layout.round_up(self.tokens) if stop >= self.tokens else layout.round_down(stop)
        for at, first in self._next_full.items():
            if first < last:
                moves.append(layout.move(at, first, last, tables))
                self._next_full[at] = last
        return moves

    def _closing(self, length: int, start: int, stop: int, tables: BlockTables) -> list[Move]:
        layout = self._layout
        moves: list[Move] = []
        for at, saved in self._next_window.items():
            first = max(saved, layout.round_down(layout.groups[at].first_token(length)))
            last = layout.round_up(length)
            if first < last:
                moves.append(layout.move(at, first, last, tables))
                self._next_window[at] = last
        for at in layout.of_kind("state"):
            # A hit's state stays next to the running one where places depend on the length.
            if length != stop and not (length == start and layout.groups[at].positional_states):
                raise EngineError(
                    f"the state after {length} tokens was not kept: the step went from "
                    f"{start} to {stop}"
                )
            moves.append(layout.state_move(at, length, tables))
        return moves


def moves_to_load(
    layout: CacheLayout, tokens: int, computed_tokens: int, tables: BlockTables
) -> tuple[Move, ...]:
    """The moves that a request needs to continue after `tokens` tokens when vLLM's cache has the
    first `computed_tokens`. Other requests share those blocks, so the load does not touch them."""
    moves: list[Move] = []
    for at, group in enumerate(layout.groups):
        if group.kind == "state":
            moves.append(layout.state_move(at, tokens, tables))
            continue
        own = computed_tokens // group.block_tokens * group.block_tokens
        first = max(own, layout.round_down(group.first_token(tokens)))
        last = layout.round_up(tokens)
        if first < last:
            moves.append(layout.move(at, first, last, tables))
    return tuple(moves)
