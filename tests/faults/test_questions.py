from __future__ import annotations

import pytest

from prfaas.measure.client import TIMED_OUT, TimedResponse
from prfaas_lab.faults.questions import Question, Verdict, judge

QUESTION = Question((1, 2), (7, 8, 9))


def verdict(
    *tokens: int, error: str | None = None, left: bool = False, gateway_died: bool = False
) -> Verdict:
    answer = TimedResponse(0.0, token_ids=list(tokens), error=error)
    return judge(QUESTION, answer, left=left, gateway_died=gateway_died)


@pytest.mark.parametrize(
    ("tokens", "error", "expected"),
    [
        ((7, 8, 9), None, Verdict.RIGHT),
        ((7, 8), None, Verdict.WRONG),  # too short, without an error
        ((7, 9, 9), None, Verdict.WRONG),
        ((7, 9), "stream failed engine_lost", Verdict.WRONG),
        ((7, 8), "stream failed engine_lost", Verdict.BROKEN),
        ((), "stream failed engine_lost", Verdict.WRONG),  # it could have been tried again
        ((), "HTTP 503 overloaded", Verdict.REFUSED),
        ((), "HTTP 429 overloaded", Verdict.REFUSED),
        ((), "HTTP 500 internal_error", Verdict.WRONG),
        ((7,), "stream cut short", Verdict.WRONG),  # without an error event
        ((7,), TIMED_OUT, Verdict.WRONG),  # silence
    ],
)
def test_what_a_client_could_be_misled_by_is_wrong(
    tokens: tuple[int, ...], error: str | None, expected: Verdict
) -> None:
    assert verdict(*tokens, error=error) is expected


def test_who_leaves_or_whose_gateway_dies_is_told_apart() -> None:
    assert verdict(7, error=TIMED_OUT, left=True) is Verdict.LEFT
    assert verdict(8, error=TIMED_OUT, left=True) is Verdict.WRONG
    for error in ("connection lost (ServerDisconnectedError)", "cannot connect"):
        assert verdict(error=error, gateway_died=True) is Verdict.LOST
        assert verdict(error=error) is Verdict.WRONG
