from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import poisson
from prfaas.sim.config import SimConfig
from prfaas.sim.results.service_level import IDLE_TTFT_SLACK, idle_service_level
from tests.planner.builders import problem

SMALL = problem(prfaas=2, pd=4, bps=1e9, bs_max=40)


def test_the_ttft_limit_is_a_multiple_of_the_idle_ttft() -> None:
    arrivals = poisson(SMALL.workload, 1.0, 300, seed=1)
    level = idle_service_level(SMALL, arrivals, SimConfig(), tpot_s=0.02)
    assert isinstance(level.ttft_s, np.ndarray)
    threshold = find_optimum(SMALL).threshold_tokens
    local = arrivals.prompt_tokens <= threshold
    assert local.any() and not local.all()
    prefill_s = np.where(
        local,
        SMALL.local.pool.profile.seconds(arrivals.prompt_tokens),
        SMALL.remotes[0].pool.profile.seconds(arrivals.prompt_tokens),
    )
    idle_s = level.ttft_s / IDLE_TTFT_SLACK
    assert np.all(idle_s > prefill_s)  # a decode step, a transfer and a round trip come on top
    assert idle_s == pytest.approx(prefill_s + 0.03, abs=0.03)


def test_the_service_level_does_not_depend_on_policy_or_speed() -> None:
    arrivals = poisson(SMALL.workload, 1.0, 300, seed=1)
    base = SimConfig()
    other = replace(base, scheduler=msgspec.structs.replace(base.scheduler, policy="local"))
    first = idle_service_level(SMALL, arrivals, base, tpot_s=0.02)
    second = idle_service_level(SMALL, arrivals.scaled(50.0), other, tpot_s=0.02)
    assert first.ttft_s == pytest.approx(second.ttft_s)
