from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.gateway_api import MAX_ROWS, TrafficRow
from prfaas.gateway.peers.traffic_rows import KEPT_ROWS, TrafficFollower, TrafficRows
from prfaas.scheduler.long_term.traffic import TrafficHistory
from tests.gateway.peer_gateways.reports import report

WINDOW_S = 1e6
OFFSET_S = 1234.5  # between the clocks of the two hosts


class Pair:
    """One gateway that has requests, and another that follows them. The lengths number the
    requests."""

    def __init__(self, started_s: float = 0.0) -> None:
        self.now_s = 1e4  # of the receiver
        self.rows = TrafficRows()
        self.instance = 0
        self.finished = 0
        self.since_restart: list[int] = []
        history = TrafficHistory(started_s, WINDOW_S)
        self.follower = TrafficFollower(history, started_s)

    def finish(self, requests: int) -> None:
        for _ in range(requests):
            self.finished += 1
            self.since_restart.append(self.finished)
            self.rows.observe(self.now_s - OFFSET_S, self.finished, 2, 3, 0.5)

    def restart(self) -> None:
        self.rows, self.instance, self.since_restart = TrafficRows(), self.instance + 1, []

    def poll(self, *, delay_s: float = 0.0, answered: bool = True) -> int:
        """Returns how many rows were sent."""
        after = self.follower.after
        first, rows = self.rows.rows_after(after, self.now_s - OFFSET_S)
        if answered:
            made = report(instance=f"run {self.instance}", first_row=first, rows=rows)
            self.follower.receive(made, after, self.now_s + delay_s)
        return len(rows)

    def catch_up(self) -> None:
        self.poll()  # may find a restart
        while self.poll():
            pass

    @property
    def recorded(self) -> list[int]:
        window = self.follower.history.window(self.now_s, (), set())
        assert list(window.at_s) == sorted(window.at_s)
        return [int(number) for number in window.new_tokens]


ACTIONS = st.one_of(
    st.tuples(st.just("finish"), st.integers(1, 700)),
    st.tuples(st.just("poll"), st.floats(0, 3)),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("pass"), st.floats(0, 10)),
)


@given(st.lists(ACTIONS, max_size=30))
def test_every_request_is_recorded_once(actions: list[tuple[str, float]]) -> None:
    pair = Pair()
    lost_with_process: set[int] = set()
    for action, amount in actions:
        if action == "finish":
            if len(pair.since_restart) + amount < KEPT_ROWS:
                pair.finish(int(amount))
        elif action == "poll":
            pair.poll(delay_s=amount)
        elif action == "fail":
            pair.poll(answered=False)
        elif action == "restart":
            lost_with_process |= set(pair.since_restart) - set(pair.recorded)
            pair.restart()
        else:
            pair.now_s += amount
    pair.catch_up()
    expected = [n for n in range(1, pair.finished + 1) if n not in lost_with_process]
    assert pair.recorded == expected


def test_rows_that_were_not_kept_are_left_out() -> None:
    pair = Pair()
    pair.finish(10)
    pair.catch_up()
    pair.finish(KEPT_ROWS + 5)
    pair.catch_up()
    assert pair.recorded == [*range(1, 11), *range(16, 10 + KEPT_ROWS + 6)]


def test_one_report_has_a_limited_number_of_rows() -> None:
    pair = Pair()
    pair.finish(2 * MAX_ROWS)
    assert [pair.poll() for _ in range(3)] == [MAX_ROWS, MAX_ROWS, 0]


def test_requests_from_before_this_gateway_started_are_not_recorded() -> None:
    pair = Pair(started_s=1e4 + 1)
    pair.finish(3)
    pair.now_s += 2
    pair.finish(2)
    pair.catch_up()
    assert pair.recorded == [4, 5]


def test_ages_become_times_of_the_receiver() -> None:
    pair = Pair()
    pair.finish(1)
    pair.now_s += 5
    pair.catch_up()
    window = pair.follower.history.window(pair.now_s, (), set())
    assert list(window.at_s) == [pair.now_s - 5]
    assert (list(window.cached_tokens), list(window.output_tokens)) == ([2.0], [3.0])


@given(st.integers(0, 3 * MAX_ROWS), st.integers(0, 1 << 40))
def test_any_number_may_be_asked_for(finished: int, after: int) -> None:
    pair = Pair()
    pair.finish(finished)
    first, rows = pair.rows.rows_after(after, pair.now_s)
    found: list[TrafficRow] = list(rows)
    assert [row[1] for row in found] == list(range(1, finished + 1))[after : after + MAX_ROWS]
    assert first == min(after, finished) + 1
