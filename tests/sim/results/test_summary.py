from __future__ import annotations

import json

import numpy as np
import pytest

from prfaas.sim.results.service_level import ServiceLevel
from prfaas.sim.results.summary import TtftSpread, summarise
from tests.sim.made_results import result

KEEPS = ServiceLevel(ttft_s=1.0, tpot_s=0.020)


def test_the_figures_of_a_calm_run() -> None:
    run = summarise(
        result([0.5] * 100, wait_s=0.1, slot_wait_s=0.05, egress_bits=[2e9] * 99 + [8e9], plans=3),
        KEEPS,
    )
    assert run.requests == 100
    assert run.throughput_rps == run.goodput_rps == pytest.approx(1.0, rel=0.02)
    assert run.ttft_s == TtftSpread(0.5, 0.5, 0.5, 0.5)
    assert run.ttft_without_queueing_s.mean == pytest.approx(0.35)
    assert run.wait_s == pytest.approx(0.1)
    assert run.tpot_s == pytest.approx(0.020)
    assert (run.egress_gbps.mean, run.egress_gbps.peak) == (2.0, 2.0)  # the last bin is outside
    assert run.offload_fraction == pytest.approx(0.25, abs=0.01)
    assert run.hit_rate == 0.25
    assert run.copied_gb == 2.0
    assert run.utilisation == {"far": 0.5, "decode": 0.25}
    assert run.plan_changes == 2
    assert run.stable and run.behind is None


def test_goodput_needs_both_limits_per_request() -> None:
    slow_half = [0.5, 1.5] * 50
    assert summarise(result(slow_half), KEEPS).goodput_rps == pytest.approx(0.5, rel=0.05)
    each = ServiceLevel(np.array([0.4, 1.6] * 50), 0.020)
    assert summarise(result(slow_half), each).goodput_rps == pytest.approx(0.5, rel=0.05)
    assert summarise(result(slow_half), ServiceLevel(2.0, 0.019)).goodput_rps == 0.0


def test_an_unstable_run_names_the_stage_and_by_how_much() -> None:
    run = summarise(result([0.5] * 100, growth=0.3), KEEPS)
    assert not run.stable
    assert run.behind is not None
    assert (run.behind.stage, run.behind.growth_s_per_s) == ("far", 0.3)


def test_json_has_no_nan() -> None:
    run = summarise(result([float("nan")] * 20), KEEPS)
    assert not run.stable
    plain = json.loads(json.dumps(run.as_dict(), allow_nan=False))
    assert plain["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert plain["throughput_rps"] == 0.0
