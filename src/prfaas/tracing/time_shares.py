"""Divides the time of a request between its spans, so that every instant counts once. Pure.

Spans overlap: the prefill runs while its state is sent, and the call to a node contains the work of
the node. At every instant the span of the highest rank has the time:

    attempt that failed   |-------|
    wait, back off                |--|
    prefill (call)                   |-----------|
      node queue                       |--|
      node prefill                        |----|
    wait for commit                  |-----------------|
    decode (call)                                      |------
                          retry   wait q.. comp.. transfer decode
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A span's claim to the time from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    rank: int
    share: str  # what the time counts as


def divide(pieces: Iterable[Piece], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of each share between `start_s` and `end_s`. Time that no piece claims is left out.
    Of pieces of equal rank the one that began later has the time."""
    inside = [
        piece._replace(start_s=max(piece.start_s, start_s), end_s=min(piece.end_s, end_s))
        for piece in pieces
    ]
    inside = [piece for piece in inside if piece.end_s > piece.start_s]
    cuts = sorted({at_s for piece in inside for at_s in (piece.start_s, piece.end_s)})
    found: dict[str, float] = {}
    for first_s, next_s in zip(cuts, cuts[1:], strict=False):
        winner = _winner(inside, first_s, next_s)
        if winner is not None:
            found[winner.share] = found.get(winner.share, 0.0) + next_s - first_s
    return found


def _winner(pieces: Sequence[Piece], start_s: float, end_s: float) -> Piece | None:
    covering = [piece for piece in pieces if piece.start_s <= start_s and piece.end_s >= end_s]
    return max(covering, key=lambda piece: (piece.rank, piece.start_s), default=None)
