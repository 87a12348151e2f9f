from __future__ import annotations

import pytest

from prfaas.measure.open_loop import RequestResult
from prfaas.measure.summary import summarise_load


def outcome(at_s: float, **changed: object) -> RequestResult:
    fields: dict[str, object] = {
        "at_s": at_s,
        "late_s": 0.5,
        "took_s": 2.0,
        "ttft_s": at_s,
        "per_token_s": 0.1,
        "prompt_tokens": 100,
        "cached_tokens": 10,
        "output_tokens": 20,
        "error": None,
    }
    return RequestResult(**{**fields, **changed})  # type: ignore[arg-type]


def test_rates_and_spreads() -> None:
    found = summarise_load([outcome(1.0), outcome(2.0), outcome(4.0), outcome(3.0, error="bad")])
    assert (found.requests, found.completed, found.errors) == (4, 3, {"bad": 1})
    assert found.offered_rps == 1.0  # 3 gaps in 3 s
    assert found.lasted_s == 5.5  # from 1.0 to 4.0 + 0.5 + 2.0
    assert found.completed_rps == pytest.approx(3 / 5.5)
    assert found.output_tokens_per_s == pytest.approx(60 / 5.5)
    assert (found.prompt_tokens, found.cached_tokens) == (300, 30)
    assert found.ttft_s is not None and found.ttft_s.p50 == 2.0 and found.ttft_s.max == 4.0
    assert found.late_s is not None and found.late_s.mean == 0.5


def test_nothing_came() -> None:
    found = summarise_load([outcome(0.0, error="timeout", ttft_s=None, cached_tokens=None)])
    assert found.completed == 0 and found.ttft_s is None and found.cached_tokens is None
    assert summarise_load([]).requests == 0
