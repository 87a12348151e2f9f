"""One attempt of one request, as booked on the board: each step is booked once, in any order of
events. Bookkeeping only.

    made ─► prefilled ─► landed ─► closed       hand-off committed, decoding, finished
      └─────────┴────────────────► closed       given up

Until its prefill is asked for, an attempt may wait for something else than its nodes (`unready`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from prfaas.clock import Clock
from prfaas.gateway.fleet.gateway_work import GatewayWork
from prfaas.scheduler.board import Board
from prfaas.scheduler.request import Route

Stage: TypeAlias = Literal["made", "landed", "closed"]


class Booking:
    def __init__(
        self,
        board: Board,
        work: GatewayWork,
        route: Route,
        kv_bytes: float,
        now_s: float,
        on_room: Callable[[], None],
        *,
        streams: bool,
        sequences: int = 1,
        tenant: str = "",
    ) -> None:
        """`on_room` is called when the prefill node has room for another request: it has finished
        with this one, or begins it later. `streams`: whether the answer does. `sequences`: so many
        choices it has."""
        self.route = route
        self._board = board
        self._on_room = on_room
        self._stage: Stage = "made"
        self._made_s = now_s
        self._dispatch = board.record_dispatch(
            route, kv_bytes, now_s, streams=streams, sequences=sequences, tenant=tenant
        )
        work.record_dispatch(route)

    @property
    def stage(self) -> Stage:
        return self._stage

    @contextmanager
    def unready(self, clock: Clock) -> Iterator[None]:
        """Meanwhile the prefill waits for something else than its node, however long, and no other
        request waits for it. An exception ends the attempt."""
        self._board.record_unready(self._dispatch, clock.now())
        self._on_room()
        yield
        self._board.record_ready(self._dispatch, clock.now())

    def prefilled(self, now_s: float) -> None:
        """The prefill node has finished with the request. May be called more than once."""
        if self._board.record_prefilled(self._dispatch, now_s):
            self._on_room()

    def landed(self, now_s: float, *, is_first_token: bool = False) -> None:
        """`is_first_token`: a node that prefills and decodes has just sent its first token."""
        assert self._stage == "made"
        self._stage = "landed"
        took_s = now_s - self._made_s if is_first_token else 0.0
        self.prefilled(now_s)
        self._board.record_handoff(self._dispatch, now_s, took_s)

    def close(self, now_s: float) -> None:
        """The attempt is over, with whatever outcome. Calling it again does nothing."""
        if self._stage == "landed":
            self._board.record_end(self._dispatch)
        elif self._stage == "made":
            self.prefilled(now_s)
            self._board.record_failure(self._dispatch, now_s)
        self._stage = "closed"
