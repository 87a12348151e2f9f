"""One attempt of one request, as the board keeps account of it: every step once, in any order of
events. Bookkeeping only.

    made ─► prefilled ─► landed ─► closed       the hand-off is in place, decoding, over
      └─────────┴────────────────► closed       given up
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from prfaas.gateway.fleet.prefill_work import PrefillWork
from prfaas.scheduler.board import Board
from prfaas.scheduler.request import Route

Stage: TypeAlias = Literal["made", "landed", "closed"]


class Booking:
    def __init__(
        self,
        board: Board,
        work: PrefillWork,
        route: Route,
        kv_bytes: float,
        now_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` hears when the prefill node has become free of it."""
        self.route = route
        self._board = board
        self._work = work
        self._kv_bytes = kv_bytes
        self._on_change = on_change
        self._stage: Stage = "made"
        board.record_dispatch(route, kv_bytes, now_s)
        work.give(self, route.prefill_s, now_s)

    @property
    def stage(self) -> Stage:
        return self._stage

    def prefilled(self, now_s: float) -> None:
        """The prefill node can go on; whoever learns it first says so."""
        if self._work.end(self, now_s):
            self._on_change()

    def landed(self, now_s: float) -> None:
        assert self._stage == "made"
        self._stage = "landed"
        self._board.record_handoff(self.route)
        self.prefilled(now_s)

    def close(self, now_s: float) -> None:
        """Over, whatever has become of it. Again: nothing."""
        if self._stage == "landed":
            self._board.record_end(self.route, self._kv_bytes)
        elif self._stage == "made":
            self._board.record_failure(self.route, self._kv_bytes)
            self.prefilled(now_s)
        self._stage = "closed"
