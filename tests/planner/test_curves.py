import numpy as np
import pytest

from prfaas.planner.curves import Atoms, WorkCurves, cut_workload
from prfaas.planner.workload import Workload
from tests.planner.builders import FAST, SPEC

WORK = Workload(
    new=np.array([100.0, 100.0, 300.0, 800.0]),
    cached=np.array([0.0, 50.0, 10.0, 0.0]),
    weight=np.array([0.1, 0.2, 0.3, 0.4]),
    output_tokens=10,
)


def test_cuts_lie_between_distinct_lengths() -> None:
    cuts = cut_workload(WORK)
    assert cuts.threshold.tolist() == [0, 100, 300, 800]
    assert cuts.p == pytest.approx([1.0, 0.7, 0.4, 0.0])
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert cuts.mean_long(values) == pytest.approx([3.0, 2.5 / 0.7, 4.0, 4.0])
    assert cuts.mean_short(values) == pytest.approx([1.0, 0.5 / 0.3, 1.4 / 0.6, 3.0])


def test_paper_uses_representative_lengths_and_exact_true_means() -> None:
    cuts, atoms = cut_workload(WORK), Atoms(WORK, SPEC)
    paper, exact = WorkCurves(cuts, atoms, "paper"), WorkCurves(cuts, atoms, "exact")
    new = (0.3 * 300 + 0.4 * 800) / 0.7
    cached = 0.3 * 10 / 0.7
    assert paper.prefill_long_s(FAST)[1] == pytest.approx(float(FAST.seconds(new, cached)))
    true = (0.3 * FAST.seconds(300, 10) + 0.4 * FAST.seconds(800, 0)) / 0.7
    assert exact.prefill_long_s(FAST)[1] == pytest.approx(float(true))
    assert exact.prefill_short_s(FAST)[1] == pytest.approx(
        float(0.1 * FAST.seconds(100, 0) + 0.2 * FAST.seconds(100, 50)) / 0.3
    )
    # Bytes are affine here, so both readings agree: only new tokens travel, states always.
    assert exact.kv_bytes_long[1] == pytest.approx(1000 * new + 50_000)
    assert paper.kv_bytes_long[1] == pytest.approx(exact.kv_bytes_long[1])
