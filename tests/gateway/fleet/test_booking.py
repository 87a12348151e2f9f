from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.gateway_work import GatewayWork
from prfaas.scheduler.board import Board, NodeReport
from prfaas.scheduler.request import Route
from prfaas.scheduler.view import LinkView
from prfaas_lab.testing.clock import FakeClock
from tests.scheduler.views import BACK, COSTS, FAR, LOCAL, NEAR, OUT, REMOTE, books

STEPS = st.lists(st.sampled_from(["unready", "prefilled", "landed", "close"]), max_size=6)


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
        bookings.append(
            Booking(
                *(board, work, route, 5e8, 0.0, free),
                streams=True,
                sequences=1 + index % 3,
                tenant=f"tenant {index % 2}",
            )
        )
    todo = [(b, step) for b, (_, steps) in zip(bookings, attempts, strict=True) for step in steps]
    random.shuffle(todo)  # type: ignore[attr-defined]
    clock, waited = FakeClock(), 0
    for now_s, (booking, step) in enumerate(todo):
        clock.advance(1.0)
        if step == "unready" and booking.stage == "made":
            with booking.unready(clock):
                left = board.own_prefills(booking.route.prefill, clock.now())
            waited += 1
            assert board.own_prefills(booking.route.prefill, clock.now()) >= left
        elif step == "prefilled":
            booking.prefilled(now_s)
        elif step == "landed" and booking.stage == "made":
            booking.landed(now_s)
        elif step == "close":
            booking.close(now_s)
    for booking in bookings:
        booking.close(100.0)
    assert len(freed) == len(attempts) + waited, "each prefill node is free of it once"
    assert set(freed) == set(range(len(attempts)))
    assert not any(work.prefills_at(name) for name in work)
    for name in (LOCAL[0], REMOTE[0]):
        board.forget_work(name)
    assert books(board) == start
    assert board.decoding(LOCAL[2]) == ({}, 0)


def test_each_choice_of_a_request_is_booked() -> None:
    board = Board(COSTS, [(NEAR, LOCAL)], {}, slots=16)
    work = GatewayWork(board, FakeClock())
    for name in LOCAL:
        work.add(name)
    route = Route(NEAR, LOCAL[0], NEAR, LOCAL[2], False, 0, 100, 1000, 2.0, (), "test")

    def book(tenant: str, sequences: int) -> Booking:
        return Booking(
            *(board, work, route, 5e8, 0.0, lambda: None),
            streams=True,
            sequences=sequences,
            tenant=tenant,
        )

    first, second, other = book("a", 64), book("a", 2), book("b", 1)
    assert board.node(LOCAL[2]).active == 67
    assert board.decoding(LOCAL[2]).own == {}, "no state is in place yet"
    for booking in (first, second, other):
        booking.landed(1.0)
    assert board.decoding(LOCAL[2]).own == {"a": 66, "b": 1}
    assert work.own_loads()[LOCAL[2]].decodes == 67, "as other gateways learn it"
    # The node has told of the same sequences, and of two more.
    board.record_report(LOCAL[2], NodeReport(2.0, 0.0, 69))
    assert board.decoding(LOCAL[2]).others == 2 and board.node(LOCAL[2]).active == 69
    first.close(3.0)
    assert board.decoding(LOCAL[2]).own == {"a": 2, "b": 1}
    assert board.node(LOCAL[2]).active == 5
