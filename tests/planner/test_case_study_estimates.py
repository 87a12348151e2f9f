"""The paper's case study from estimates alone: neither the catalog nor the fit has its times."""

from __future__ import annotations

import pytest

from prfaas.catalog import Catalog
from prfaas.config import load_deployment
from prfaas.planner.comparison import compare
from prfaas.planner.instance_times import Lengths, PlannedModel, TimesFinder
from prfaas.planner.problem import Problem, build_problem
from prfaas.planner.ranges import Range, plan_ranges
from prfaas_lab.fitting.fit import fit
from prfaas_lab.fitting.observations import builtin_observations
from tests.planner.builders import CASE_STUDY, case_study

MODEL = "case-study-1t"
# Table 6 of the paper.
PUBLISHED_THRESHOLD = 19_400
PUBLISHED_GAIN = 1.54
PUBLISHED_LAMBDA_RPS = 3.24


@pytest.fixture(scope="module")
def hidden() -> Problem:
    """The case study with its own times hidden."""
    builtin, stated = Catalog.builtin(), case_study()
    others = tuple(record for record in builtin.profiles if record.model != MODEL)
    catalog = Catalog(builtin.models, builtin.accelerators, others)
    times = TimesFinder(
        catalog,
        PlannedModel.of_catalog(catalog, MODEL, stated.spec),
        Lengths.of(stated.workload),
        constants=fit(builtin_observations(), lambda seen: seen.model == MODEL),
    )
    deployment = load_deployment(CASE_STUDY)
    return build_problem(deployment, catalog, stated.spec, stated.workload, times)


def test_everything_is_estimated(hidden: Problem) -> None:
    assert all(pool.error is not None for pool in hidden.pools)
    assert hidden.local.decode_error is not None
    assert "known times" not in hidden.local.pool.profile.provenance


def test_threshold_and_gain_are_near_the_published_ones(hidden: Problem) -> None:
    plan = compare(hidden, "paper")
    assert plan.prfaas_pd.threshold_tokens == pytest.approx(PUBLISHED_THRESHOLD, rel=0.3)
    assert plan.ratios["prfaas_over_homogeneous"] == pytest.approx(PUBLISHED_GAIN, abs=0.15)


def test_the_ranges_cover_the_published_figures(hidden: Problem) -> None:
    ranges = plan_ranges(hidden, "paper", narrow=False)
    assert ranges is not None

    def covers(found: Range | None, published: float) -> bool:
        return found is not None and found.low <= published <= found.high

    assert covers(ranges.threshold_tokens, PUBLISHED_THRESHOLD)
    assert covers(ranges.over_homogeneous, PUBLISHED_GAIN)
    assert covers(ranges.lambda_max_rps, PUBLISHED_LAMBDA_RPS)
