"""The equations with numbers worked out by hand, and with the paper's own."""

import numpy as np
import pytest

from prfaas.planner.equations import (
    eq1_kv_throughput_bps,
    eq2_min_egress_bps,
    eq3_theta_prfaas,
    eq4_theta_pd_p,
    eq5_theta_pd_d,
    eq6_lambda_max,
    eq7_threshold_imbalance,
    eq8_split_imbalance,
)


def test_eq1_table_5_row() -> None:
    # 701.3 MiB in 1.84 s is printed as 3.19 Gbps.
    assert eq1_kv_throughput_bps(701.3 * 2**20, 1.84) == pytest.approx(3.19e9, rel=0.005)


@pytest.mark.parametrize(
    ("gpus", "phi_gbps", "printed_gbps"),
    [(512, 59.93, 3800), (512, 33.35, 2100), (512, 2.59, 170), (10_000, 1.46, 1800)],
)
def test_eq2_section_2_3(gpus: int, phi_gbps: float, printed_gbps: float) -> None:
    assert eq2_min_egress_bps(gpus, 8, phi_gbps) == pytest.approx(printed_gbps, rel=0.03)


def test_eq3_takes_the_slower_of_compute_and_egress() -> None:
    assert eq3_theta_prfaas(4, 2.0, 1e9, 1e6) == 2.0
    assert eq3_theta_prfaas(4, 2.0, 1e7, 1e6) == pytest.approx(1e7 / 8e6)


def test_eq4_and_eq5() -> None:
    assert eq4_theta_pd_p(3, 1.5) == 2.0
    # Table 6: five decode instances, batch 20 at 25 ms, 1,024 output tokens.
    assert eq5_theta_pd_d(5, 20, 0.025, 1024) == pytest.approx(3.91, rel=0.002)


def test_eq6_is_the_slowest_stage_for_its_share() -> None:
    assert eq6_lambda_max(1.0, 2.0, 10.0, 0.25) == pytest.approx(2 / 0.75)
    assert eq6_lambda_max(0.5, 2.0, 10.0, 0.25) == pytest.approx(2.0)
    assert eq6_lambda_max(0.5, 2.0, 1.0, 0.25) == 1.0
    # Everything or nothing offloaded: the idle stage does not count.
    np.testing.assert_array_equal(
        eq6_lambda_max(np.array([1.0, 0.0]), np.array([0.0, 2.0]), 9.0, np.array([1.0, 0.0])),
        [1.0, 2.0],
    )


def test_eq7_and_eq8_vanish_in_balance() -> None:
    assert eq7_threshold_imbalance(1.0, 3.0, 0.25) == pytest.approx(0.0)
    assert eq7_threshold_imbalance(1.1, 3.0, 0.25) == pytest.approx(0.1)
    assert eq8_split_imbalance(1.0, 3.0, 4.0) == 0.0
    # Table 6's integer split leaves decode 17% of slack.
    assert eq8_split_imbalance(1.61, 1.64, 3.91) == pytest.approx(-0.17, abs=0.005)
