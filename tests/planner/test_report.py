from __future__ import annotations

import json
import math
from dataclasses import replace

from prfaas.catalog import Catalog
from prfaas.estimator.uncertainty import EstimateError
from prfaas.planner.ranges import PlanRanges, Range
from prfaas.planner.report import estimated_times, estimates_as_dict
from tests.planner.builders import problem

ERROR = EstimateError("prefill of m on 8 x mi300x", (("prefill model m", 0.3),), 0.4)


def test_what_is_estimated_names_inferred_figures() -> None:
    given = problem()
    pool = replace(given.local.pool, accelerator="mi300x", error=ERROR)
    (found,) = estimated_times(
        replace(given, local=replace(given.local, pool=pool)), Catalog.builtin()
    )
    assert (found.cluster, found.what, found.accelerator) == ("near", "prefill", "mi300x")
    assert "bf16_tflops" in found.inferred and "memory_gb" not in found.inferred
    report = estimates_as_dict([found], None)
    assert report["estimated"][0]["log_error"] == 0.5
    assert report["ranges"] is None and report["narrow_with"] is None


def test_an_unstable_bound_is_null_in_json() -> None:
    rate = Range(1.0, 2.0, 3.0)
    ranges = PlanRanges(None, rate, rate, Range(1.0, 2.0, math.inf), None, rate, None, 0.25, None)
    report = estimates_as_dict([], ranges)["ranges"]
    assert report["ttft_mean_s"] == {"low": 1.0, "median": 2.0, "high": None}
    assert report["threshold_tokens"] is None and report["slo_missed"] == 0.25
    json.dumps(report, allow_nan=False)
