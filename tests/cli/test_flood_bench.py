"""What `bench flood` concludes from what it has seen. The runs themselves are live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prfaas.measure.open_loop import RequestResult
from prfaas.planner.workload import lognormal
from prfaas.sim.arrivals import Arrivals
from tests.benches import bench

flood = bench("flood")
WORK = lognormal(6.5, 1.0, 20, 5000, output_tokens=8, cached_tokens=0)


def arrivals(count: int) -> Arrivals:
    """A request per second, each with 8 tokens of output."""
    ones = np.ones(count, dtype=np.int64)
    return Arrivals(np.arange(1.0, count + 1), 100 * ones, 0 * ones, 8 * ones)


def completed(at_s: float) -> RequestResult:
    return RequestResult(
        at_s=at_s,
        late_s=0.0,
        took_s=3.0,
        ttft_s=2.0,
        per_token_s=0.1,
        prompt_tokens=100,
        cached_tokens=None,
        output_tokens=8,
        error=None,
    )


def home_phase(name: str, first_tokens: int, p90_s: float, failed: int = 0) -> Any:
    rps = first_tokens / 144
    failures = {"HTTP 503 overloaded": failed} if failed else {}
    return flood.HomePhase(name, 1.1, 1.0, first_tokens, rps, p90_s, failures)


def missed(checks: list[Any]) -> list[str]:
    return [check.claim for check in checks if not check.held]


CALM = [home_phase("east", 140, 2.0), home_phase("west", 140, 2.0)]


def test_the_goals_of_a_flood() -> None:
    during = [home_phase("east", 50, 60.0, 7), home_phase("west", 127, 2.9)]
    checks = flood.flood_checks(flood.Flood("east", 180.0, CALM, during))
    assert missed(checks) == []
    assert "90.7% of the calm phase, 80.2% of the planned rate" in [check.seen for check in checks]
    bad = [home_phase("east", 125, 3.1, 1), home_phase("west", 200, 9.0)]
    assert missed(flood.flood_checks(flood.Flood("west", 180.0, CALM, bad))) == [
        "east: no request fails",
        "east keeps its rate within 10% while west floods",
        "east: P90 TTFT within 1.5x of the calm phase",
    ]


def test_failures_of_both_phases_count() -> None:
    calm, during = ([home_phase("east", 140, 2.0, count)] for count in (1, 2))
    (first, *_) = flood.flood_checks(flood.Flood("west", 180.0, calm, during))
    assert not first.held and first.seen == "{'HTTP 503 overloaded': 3}"


@pytest.mark.parametrize(("calm", "during"), [(99, 140), (140, 99)])
def test_a_flood_with_too_few_first_tokens_is_void(calm: int, during: int) -> None:
    phases = [[home_phase("east", count, 2.0)] for count in (calm, during)]
    found = flood.Flood("west", 180.0, *phases)
    first, *others = flood.flood_checks(found)
    assert (first.claim, first.held) == ("the run is void", False)
    name = "calm" if calm < during else "flood"
    assert f"east has 99 first tokens in the {name} phase" in first.seen
    assert "give --seconds 182 or more" in first.seen
    assert [check.held for check in others] == [True, None, None]
    enough = [[home_phase("east", 100, 2.0)]] * 2
    assert flood.void_lines(flood.Flood("west", 180.0, *enough)) == []
    silent = [[home_phase("east", 0, 2.0)]] * 2
    assert "give --seconds 360" in flood.void_lines(flood.Flood("west", 180.0, *silent))[0]


def test_a_phase_counts_a_home_after_its_queues_have_settled() -> None:
    made = arrivals(100)
    results = [completed(at_s) for at_s in made.at_s.tolist()]
    found = flood.home_phase("east", 1.2, made, results, 100.0)
    assert (found.home, found.planned_rps, found.failures) == ("east", 1.2, {})
    assert (found.offered_rps, found.first_tokens, found.first_tokens_rps) == (1.0, 80, 1.0)
    assert found.p90_ttft_s == pytest.approx(2.0)


def test_requests_without_a_whole_answer_have_failed() -> None:
    made = arrivals(4)
    first, second, third, fourth = (completed(at_s) for at_s in made.at_s.tolist())
    results = [
        first,
        replace(second, output_tokens=7),
        replace(third, ttft_s=None, output_tokens=0, error="timeout"),
        replace(fourth, ttft_s=None, output_tokens=0, error="timeout"),
    ]
    found = flood.home_phase("west", 1.0, made, results, 100.0)
    assert found.failures == {"another number of tokens": 1, "timeout": 2}
    assert found.first_tokens == 0, "all of them are from before the queues have settled"


def test_a_home_that_sends_at_the_same_rate_sends_the_same_requests() -> None:
    calm, again = (flood.arrivals_until(WORK, 2.0, 30.0, 7) for _ in range(2))
    assert len(calm) > 30 and calm.at_s[-1] <= 30.0
    assert calm.at_s.tolist() == again.at_s.tolist()
    assert calm.prompt_tokens.tolist() == again.prompt_tokens.tolist()
    flooding = flood.arrivals_until(WORK, 6.0, 30.0, 7)
    assert len(flooding) > 2 * len(calm)
