from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.gateway_work import GatewayWork
from prfaas.scheduler.board import Board
from prfaas.scheduler.request import Route
from prfaas.scheduler.view import LinkView
from prfaas.testing.clock import FakeClock
from tests.scheduler.views import BACK, COSTS, FAR, LOCAL, NEAR, OUT, REMOTE, books

STEPS = st.lists(st.sampled_from(["prefilled", "landed", "close"]), max_size=6)


@given(st.lists(st.tuples(st.booleans(), STEPS), min_size=1, max_size=8), st.randoms())
def test_after_its_end_a_request_leaves_nothing_on_the_board(
    attempts: list, random: object
) -> None:
    """Steps of several attempts in any order, each booked any number of times."""
    link = LinkView(True, 1e8, 0.01, None, 0.0)
    board = Board(COSTS, [(NEAR, LOCAL), (FAR, REMOTE)], {OUT: link, BACK: link}, slots=4)
    work = GatewayWork(board, FakeClock())
    for name in (*LOCAL, *REMOTE):
        work.add(name)
    start = books(board)
    freed: list[int] = []
    bookings = []
    for index, (offloaded, _) in enumerate(attempts):
        prefill = REMOTE[0] if offloaded else LOCAL[0]
        cluster = FAR if offloaded else NEAR
        route = Route(cluster, prefill, NEAR, LOCAL[2], offloaded, 0, 100, 1000, 2.0, (), "test")
        free = partial(freed.append, index)
        bookings.append(Booking(board, work, route, 5e8, 0.0, free, streams=True))
    todo = [(b, step) for b, (_, steps) in zip(bookings, attempts, strict=True) for step in steps]
    random.shuffle(todo)  # type: ignore[attr-defined]
    for now_s, (booking, step) in enumerate(todo):
        if step == "prefilled":
            booking.prefilled(now_s)
        elif step == "landed" and booking.stage == "made":
            booking.landed(now_s)
        elif step == "close":
            booking.close(now_s)
    for booking in bookings:
        booking.close(100.0)
    assert sorted(freed) == list(range(len(attempts))), "each prefill node is free of it once"
    assert not any(work.prefills_at(name) for name in work)
    for name in (LOCAL[0], REMOTE[0]):
        board.forget_work(name)
    assert books(board) == start
