from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from prfaas.planner.curves import Atoms
from prfaas.planner.latency import predict
from prfaas.planner.workload import Workload
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.view import View
from tests.scheduler.views import (
    FAR,
    LOCAL,
    NEAR,
    PROBLEM,
    REMOTE,
    Hit,
    explain_at,
    policies,
    requests,
    state,
    view,
    views,
)


@given(requests, views, policies)
def test_the_chosen_route_is_among_the_alternatives(
    request: Request, seen: View, policy: str
) -> None:
    found = explain_at(request, seen, state(policy))
    times = [alternative.forecast.ttft_s for alternative in found.alternatives]
    assert times == sorted(times)
    if isinstance(found.chosen, Route):
        assert found.chosen.cluster in {a.cluster for a in found.alternatives}


@pytest.mark.parametrize("tokens", [200, 3000])
def test_an_idle_forecast_is_the_planners(tokens: int) -> None:
    """One definition of TTFT: a workload of this one length, at no load."""
    work = Workload(np.array([float(tokens)]), np.zeros(1), np.ones(1), output_tokens=100)
    alone = replace(PROBLEM, workload=work)
    found = explain_at(Request(1, tokens), view(), state("paper")).alternatives
    forecasts = {alternative.cluster: alternative.forecast for alternative in found}
    for cluster, threshold in ((NEAR, tokens), (FAR, 0)):
        said = predict(alone, Atoms(work, PROBLEM.spec), threshold, 2, [1.0], 1e-9)
        assert said.ttft is not None
        assert forecasts[cluster].ttft_s == pytest.approx(said.ttft.mean_s, rel=1e-6)


def test_a_foreign_prefix_is_a_separate_alternative() -> None:
    seen = view({REMOTE[1]: Hit(1280, 1280)})
    found = explain_at(Request(1, 1500), seen, state("adaptive")).alternatives
    ways = {(a.cluster, a.cached_tokens, bool(a.copies)) for a in found}
    assert ways == {(NEAR, 0, False), (NEAR, 1280, True), (FAR, 1280, False)}
    assert all(a.node in LOCAL + REMOTE for a in found)
