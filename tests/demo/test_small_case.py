from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prfaas.config import load_deployment
from prfaas.demo.small_case import (
    SYSTEMS,
    egress_gbps,
    failures,
    first_token_stats,
    first_tokens_s,
    lost_requests,
    shared_hosts,
    small_case,
)
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.preparation import Wan
from prfaas.measure.client import TIMED_OUT
from prfaas.measure.open_loop import RequestResult
from prfaas.sim.arrivals import Arrivals

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
SCALES = Scales(time=0.5, bytes=1 / 64, output=1 / 32)


def outcome(at_s: float, ttft_s: float | None, error: str | None = None) -> RequestResult:
    return RequestResult(at_s, 0.25, 1.0, ttft_s, None, 10, None, 1, error)


def test_first_tokens_of_the_counted_time() -> None:
    arrival_s = np.arange(11.0)  # counted from 2 s (a fifth of them) to 10 s
    first_s = arrival_s + 1.0
    first_s[5] = np.nan  # never answered
    found = first_token_stats(arrival_s, first_s, SCALES)
    # First tokens at 2, 3, 4, 5, 7, 8, 9, 10 s: 8 in 8 s of this machine.
    assert found.counted == 8
    assert found.rps == pytest.approx(1.0 * SCALES.time)
    assert found.ttft_mean_s == pytest.approx(1.0 / SCALES.time)
    assert first_token_stats(arrival_s, np.full(11, np.nan), SCALES).rps == 0.0


def test_outcomes_find_their_arrivals() -> None:
    tokens = np.ones(3, np.int64)
    arrivals = Arrivals(np.array([1.0, 2.0, 4.0]), tokens, tokens, tokens)
    found = first_tokens_s(arrivals, [outcome(4.0, 2.0), outcome(1.0, 0.5), outcome(2.0, None)])
    assert found.tolist()[::2] == [1.75, 6.25] and np.isnan(found[1])


def test_what_a_runs_end_cut_off_is_no_failure() -> None:
    outcomes = [outcome(1.0, None, TIMED_OUT), outcome(2.0, 1.0), outcome(3.0, None, "HTTP 500")]
    assert failures(outcomes) == {"HTTP 500": 1}


def test_a_request_without_a_first_token_is_lost_in_a_run_that_waited_for_it() -> None:
    outcomes = [outcome(1.0, None, TIMED_OUT), outcome(2.0, 1.0, TIMED_OUT), outcome(3.0, 1.0)]
    assert lost_requests(outcomes) == 1


def test_egress_is_that_of_the_whole_deployment() -> None:
    # Half the time: bits pass twice as fast. A 64th of the bytes.
    assert egress_gbps(1e9, SCALES) == pytest.approx(32.0)


def test_hosts_enough_for_every_deployment_on_a_wan_of_ones_own(tmp_path: Path) -> None:
    deployment = load_deployment(CASE_STUDY)
    wan = Wan(gbps=10.0)
    cases = {
        name: small_case(deployment, CASE_STUDY, tmp_path, SCALES, name, wan) for name in SYSTEMS
    }
    assert [c.instances for c in shared_hosts(cases).deployment.clusters] == [4, 12]
    path = cases["prfaas_pd"].problem.remotes[0].path
    assert path.bps == pytest.approx(10e9 * SCALES.bytes / SCALES.time)
