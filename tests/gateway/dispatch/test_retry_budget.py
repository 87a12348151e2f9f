from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.dispatch.retry_budget import MAX_ATTEMPTS, RetryBudget


@given(st.lists(st.booleans(), max_size=400))
def test_retries_are_a_share_of_the_requests(events: list[bool]) -> None:
    budget = RetryBudget()
    requests = 0
    for is_request in events:
        if is_request:
            requests += 1
            budget.request()
        else:
            budget.take(1)
        assert 0 <= budget.left <= budget.limit
        assert budget.spent <= budget.limit + requests * budget.per_request + 1e-9
    assert budget.spent + budget.denied == len(events) - requests


def test_nobody_is_tried_for_ever() -> None:
    budget = RetryBudget()
    assert [budget.take(n) for n in range(1, MAX_ATTEMPTS + 1)] == [True] * (MAX_ATTEMPTS - 1) + [
        False
    ]


def test_a_quiet_time_is_not_saved_up_without_end() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.request()
    assert sum(budget.take(1) for _ in range(1000)) == budget.limit
