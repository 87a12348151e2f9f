import dataclasses

from prfaas.planner import baselines
from tests.planner.builders import case_study, problem


def test_the_case_studys_baselines() -> None:
    subject = case_study()
    same_gpus, same_money = baselines.homogeneous(subject), baselines.equal_cost(subject)
    assert same_gpus is not None and same_money is not None
    assert same_gpus.local.pool.gpus == 96 and not same_gpus.remotes
    assert same_money.local.pool.gpus == 128  # an H200 costs two H20
    away = baselines.naive(subject)
    assert away is not None
    assert (away.fixed_threshold, away.local.fixed_prefill) == (0, 0)


def test_baselines_that_do_not_exist() -> None:
    assert baselines.naive(problem(prfaas=0)) is None
    assert baselines.homogeneous(problem(prfaas=0, pd=1)) is None
    subject = problem()
    unpriced = dataclasses.replace(
        subject,
        local=dataclasses.replace(
            subject.local, pool=dataclasses.replace(subject.local.pool, usd_per_gpu_hour=None)
        ),
    )
    assert baselines.equal_cost(unpriced) is None
    assert baselines.homogeneous(unpriced) is not None


def test_fixed_variables_do_not_bind_the_homogeneous_baseline() -> None:
    subject = problem(fixed_prefill=1, fixed_threshold=100)
    other = baselines.homogeneous(subject)
    assert other is not None
    assert other.local.fixed_prefill is None and other.fixed_threshold is None
