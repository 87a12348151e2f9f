"""What a PD cluster serves by itself, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.planner.alone import SPLIT_SHARE, LocalOnly, alone_rps, local_only
from prfaas.planner.curves import Atoms, Reading, WorkCurves, cut_workload
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.workload import Workload
from tests.planner.builders import problem


def workload(*lengths: int) -> Workload:
    """Lengths of equal weight, whose prefills take 0.2 s (100), 1.4 s (1000) or 25 s (10,000) on
    the local pool; 100 output tokens."""
    new = np.array(lengths, dtype=float)
    return Workload(new, np.zeros(len(new)), np.full(len(new), 1 / len(new)), output_tokens=100)


def test_an_instance_alone_pays_for_the_prefill_and_for_its_share_of_the_steps() -> None:
    # A prefill takes (0.2 + 1.4) / 2 = 0.8 s; decode 100 steps of 20 ms, in batches of 4: 0.5 s.
    assert alone_rps(problem(workload(100, 1000), pd=1)) == pytest.approx(1 / 1.3)
    assert alone_rps(problem(workload(100, 1000), pd=3)) == pytest.approx(3 / 1.3)


def test_prfaas_clusters_and_a_threshold_take_nothing() -> None:
    ours = alone_rps(problem(workload(100, 1000), prfaas=5, fixed_threshold=100))
    assert ours == alone_rps(problem(workload(100, 1000), prfaas=0))


def test_the_paper_reading_pays_for_the_mean_length() -> None:
    subject = problem(workload(100, 1000), pd=1)
    atoms = Atoms(subject.workload, subject.spec)
    curves = WorkCurves(cut_workload(subject.workload), atoms, "paper")
    mean_s = float(subject.local.pool.profile.seconds(550))
    assert alone_rps(subject, curves) == pytest.approx(1 / (mean_s + 0.5))


def test_a_split_that_fits_is_better_than_instances_alone() -> None:
    # Prefill takes 1.4 s and decode 0.5 s: of 19 instances 14 prefill, and all are always busy.
    found = local_only(problem(workload(1000), pd=19))
    assert found == LocalOnly(n_prefill=14, rps=pytest.approx(10.0), alone=False)


def test_instances_serve_alone_where_a_split_would_leave_them_idle() -> None:
    # Of two instances one would prefill (1 / 1.4 s) and the other would have nothing to do for most
    # of the time; alone they serve 2 / 1.9 s.
    found = local_only(problem(workload(1000), pd=2))
    assert found == LocalOnly(n_prefill=0, rps=pytest.approx(2 / 1.9), alone=True)


def test_a_split_without_prefill_instances_serves_nothing_by_itself() -> None:
    assert local_only(problem(workload(1000), pd=19, fixed_prefill=0)).alone


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=4, unique=True).map(sorted),
    st.integers(0, 2),
    st.integers(1, 40),
    st.integers(1, 60),
    st.sampled_from(["paper", "exact"]),
)
def test_never_below_a_split_and_one_instance_serves(
    lengths: list[int], prfaas: int, pd: int, bs_max: int, reading: Reading
) -> None:
    subject = problem(workload(*lengths), prfaas=prfaas, pd=pd, bs_max=bs_max)
    without = problem(subject.workload, prfaas=0, pd=pd, bs_max=bs_max)
    curves = WorkCurves(
        cut_workload(subject.workload), Atoms(subject.workload, subject.spec), reading
    )
    found = local_only(subject, curves)
    split_rps = stage_rates(without, curves, optimise(without, curves)).lambda_max
    assert found.rps >= split_rps
    assert found.rps >= SPLIT_SHARE * alone_rps(subject, curves) > 0
    assert alone_rps(subject, curves) >= split_rps * (1 - 1e-9)
    assert found.alone == (found.n_prefill == 0)
