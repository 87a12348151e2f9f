from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.planner import baselines
from prfaas.planner.curves import Atoms, Reading, WorkCurves, cut_workload
from prfaas.planner.drawn_plans import Draws, plan_draws
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Problem
from prfaas.planner.profile import DecodeRate
from tests.planner.builders import FAST, SLOW, problem

FACTORS = np.exp(np.random.default_rng(0).normal(0, 0.7, (12, 3)))


def two_remotes() -> Problem:
    given = problem(prfaas=3, pd=20)
    (remote,) = given.remotes
    other = replace(remote, pool=replace(remote.pool, cluster="other", profile=SLOW))
    return replace(given, remotes=(remote, other))


@pytest.mark.parametrize("reading", ["paper", "exact"])
@pytest.mark.parametrize(
    "given",
    [
        problem(prfaas=3, pd=20),
        problem(prfaas=3, pd=2, bps=1e6),
        problem(prfaas=1, pd=12, fixed_prefill=0),
        problem(prfaas=60, pd=60, bps=1e11),
        problem(prfaas=2, pd=12, fixed_prefill=3, fixed_threshold=700),
        problem(prfaas=0, pd=30),
        two_remotes(),
    ],
    ids=["usual", "thin link", "no prefill", "one of many", "fixed", "no remote", "two remotes"],
)
def test_each_draw_is_planned_as_alone(given: Problem, reading: Reading) -> None:
    draws = Draws(
        {FAST: FACTORS[:, 0], SLOW: FACTORS[:, 1]},
        tuple(DecodeRate(4, 0.02 * float(factor)) for factor in FACTORS[:, 2]),
    )
    curves = WorkCurves(cut_workload(given.workload), Atoms(given.workload, given.spec), reading)
    found = plan_draws(given, curves, draws)
    for index, (fast, slow, _) in enumerate(FACTORS.tolist()):
        factors = {FAST: fast, SLOW: slow}
        alone = replace(
            given,
            remotes=tuple(
                replace(
                    r, pool=replace(r.pool, profile=r.pool.profile.paced(factors[r.pool.profile]))
                )
                for r in given.remotes
            ),
            local=replace(
                given.local,
                pool=replace(given.local.pool, profile=SLOW.paced(slow)),
                decode=draws.decode[index],
            ),
        )
        choice = optimise(alone, curves)
        rates = stage_rates(alone, curves, choice)
        assert found.lambda_max[index] == pytest.approx(rates.lambda_max)
        assert (found.row[index], found.n_prefill[index]) == choice
        assert found.each_prfaas[:, index] == pytest.approx(rates.each_prfaas)


def test_a_baseline_shares_the_draws() -> None:
    given = problem(prfaas=3, pd=20)
    draws = Draws({SLOW: FACTORS[:, 1]}, (given.local.decode,) * len(FACTORS))
    curves = WorkCurves(cut_workload(given.workload), Atoms(given.workload, given.spec), "paper")
    baseline = baselines.homogeneous(given)
    assert baseline is not None
    found = plan_draws(baseline, curves, draws)
    assert found.each_prfaas.shape == (0, len(FACTORS))
    assert (np.argsort(found.lambda_max) == np.argsort(-FACTORS[:, 1])).all()
