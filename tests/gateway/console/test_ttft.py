"""The split of the time to the first token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.console.ttft import split_ttft
from prfaas.gateway.request import RequestTrace


def trace(**fields: Any) -> RequestTrace:
    return RequestTrace(10.0, **fields)


def test_a_hand_off_has_four_parts() -> None:
    found = split_ttft(
        trace(
            routed_s=11.0,
            granted_s=11.5,
            waited_s=2.0,
            prefilled_s=15.0,
            committed_s=15.5,
            first_token_s=15.75,
        )
    )
    assert found == (2.0, 3.0, 0.5, 0.25)


def test_an_answer_after_the_commit_is_a_transfer_that_the_prefill_hides() -> None:
    times = {"routed_s": 11.0, "granted_s": 11.5, "committed_s": 15.0, "first_token_s": 15.5}
    assert split_ttft(trace(waited_s=2.0, prefilled_s=15.2, **times)) == (2.0, 3.0, 0.0, 0.5)
    unreported = split_ttft(trace(**times))
    assert unreported == (1.5, 3.5, 0.0, 0.5), "the prefill is taken to begin with the grant"


def test_without_a_hand_off_the_prefill_has_all_but_the_wait() -> None:
    assert split_ttft(trace(routed_s=10.5, first_token_s=12.0)) == (0.5, 1.5, 0.0, 0.0)


def test_a_request_without_a_first_token_has_no_split() -> None:
    assert split_ttft(trace(routed_s=10.5)) is None
    assert split_ttft(trace(first_token_s=10.5)) is None, "a sum of several prompts"


@given(
    st.lists(st.floats(0, 100), min_size=5, max_size=5),
    st.floats(-1, 100),
    st.booleans(),
    st.booleans(),
)
def test_the_parts_add_up(times: list[float], waited_s: float, hands: bool, reports: bool) -> None:
    """Also where the clocks of the reports disagree."""
    routed_s, granted_s, prefilled_s, committed_s, first_s = (10.0 + t for t in times)
    found = split_ttft(
        trace(
            routed_s=routed_s,
            granted_s=granted_s,
            prefilled_s=prefilled_s if reports else None,
            committed_s=committed_s if hands else None,
            first_token_s=first_s,
            waited_s=waited_s,
        )
    )
    assert found is not None and min(found) >= 0
    assert found.total_s == pytest.approx(first_s - 10.0)
