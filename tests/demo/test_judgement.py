"""Every outcome that the demo's comparison can have: ok, FAILED, not judged."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from prfaas.demo.cpu_probe import CpuProbe, probe_cpu
from prfaas.demo.disturbance import LIMIT, Counters, Disturbance, disturbance
from prfaas.demo.judgement import NEAR, Row, better_of, judge_rows
from prfaas.demo.small_case import FirstTokenStats
from prfaas.engine.api import StepTiming
from prfaas.wan.stats import RelayStats
from tests.waiting import wait_until

SIMULATED = {"prfaas_pd": 3.0, "homogeneous": 2.0, "naive": 2.5}  # 1.5x and 1.2x
CALM = Disturbance(0.3, LIMIT * 0.3 / 2, 0.0, 0.0, 0.0)
BUSY = Disturbance(0.3, LIMIT * 0.3 * 2, 0.0, 0.0, 0.0)


def row(system: str, live: float | None = None, **changed: Any) -> Row:
    simulated = SIMULATED[system]
    fields: dict[str, Any] = {"failures": {}, "disturbance": CALM, **changed}
    live_rps = simulated if live is None else live
    return Row(
        system,
        FirstTokenStats(40, live_rps, 1, 2),
        FirstTokenStats(40, simulated, 1, 2),
        3.0,
        None,
        **fields,
    )


def marks(*rows: Row) -> list[str]:
    return [check.mark for check in judge_rows(rows)]


def test_ratios_as_simulated_are_ok() -> None:
    rows = [row("prfaas_pd"), row("homogeneous"), row("naive")]
    answered, compared = judge_rows(rows)
    assert (answered.mark, compared.mark) == ("ok", "ok")
    assert "1.50x homogeneous PD (simulated: 1.50x)" in compared.seen
    assert f"the limit is {LIMIT:.0%}" in compared.seen


@pytest.mark.parametrize("baseline", ["homogeneous", "naive"])
def test_one_ratio_far_below_the_simulated_one_fails(baseline: str) -> None:
    ratio = SIMULATED["prfaas_pd"] / SIMULATED[baseline]
    others = [row(name) for name in ("homogeneous", "naive") if name != baseline]
    for share, expected in ((NEAR - 0.01, "FAILED"), (NEAR + 0.01, "ok")):
        live = SIMULATED["prfaas_pd"] / (ratio * share)
        assert marks(row("prfaas_pd"), row(baseline, live), *others) == ["ok", expected]


def test_a_ratio_of_one_fails_even_where_the_simulated_one_is_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SIMULATED, "naive", 2.95)
    assert marks(row("prfaas_pd"), row("naive", 3.0)) == ["ok", "FAILED"]


def test_good_ratios_to_slow_baselines_do_not_hide_a_slow_prfaas_pd() -> None:
    slow = [row(name, SIMULATED[name] * (NEAR - 0.01)) for name in SIMULATED]
    assert marks(*slow) == ["ok", "FAILED"]


def test_a_deployment_that_serves_nothing_fails() -> None:
    assert marks(row("prfaas_pd", 0.0), row("homogeneous")) == ["ok", "FAILED"]
    assert marks(row("prfaas_pd"), row("homogeneous", 0.0)) == ["ok", "FAILED"]


@pytest.mark.parametrize("system", list(SIMULATED))
@pytest.mark.parametrize("live", [1.0, 3.0])
def test_a_busy_machine_is_not_judged_whatever_the_ratios(system: str, live: float) -> None:
    rows = [
        row(
            name,
            live if name == "prfaas_pd" else None,
            disturbance=BUSY if name == system else CALM,
        )
        for name in SIMULATED
    ]
    answered, compared = judge_rows(rows)
    assert (answered.mark, compared.mark) == ("ok", "not judged")
    assert f"{BUSY.share:.1%}" in compared.seen and f"the limit is {LIMIT:.0%}" in compared.seen


@pytest.mark.parametrize("disturbed", [CALM, BUSY])
def test_a_failed_request_fails_busy_or_not(disturbed: Disturbance) -> None:
    failed = row("naive", failures={"HTTP 500": 3}, disturbance=disturbed)
    answered, _ = judge_rows([row("prfaas_pd"), row("homogeneous"), failed])
    assert answered.mark == "FAILED" and "HTTP 500" in answered.seen


def test_a_repeated_measurement_keeps_the_failures_of_both() -> None:
    first = row("naive", 1.0, failures={"HTTP 500": 1, "timeout": 2}, disturbance=BUSY)
    second = row("naive", 2.0, failures={"timeout": 1}, disturbance=CALM)
    kept = better_of(first, second)
    assert kept.live.rps == 2.0 and kept.disturbance == CALM
    assert kept.failures == {"HTTP 500": 1, "timeout": 3}
    assert better_of(second, first) == kept


def test_a_limit_that_is_just_reached_is_still_judged() -> None:
    assert not row("naive", disturbance=Disturbance(1.0, LIMIT, 0.0, 0.0, 0.0)).disturbed
    assert row("naive", disturbance=Disturbance(1.0, LIMIT, 0.001, 0.0, 0.0)).disturbed


def relay(forwards: int, late_s: float, wakeups: int = 0, wakeup_late_s: float = 0.0) -> RelayStats:
    return RelayStats(
        0, 0, 0, 0, 0, 0, 0, 0,
        forwards=forwards, forward_late_s=late_s, wakeups=wakeups, wakeup_late_s=wakeup_late_s,
    )  # fmt: skip


def test_disturbance_is_of_the_load_alone() -> None:
    before = Counters(StepTiming(100, 50.0, 9.0), relay(10, 1.0))
    after = Counters(StepTiming(200, 100.0, 11.0), relay(40, 1.2, wakeups=10, wakeup_late_s=0.2))
    found = disturbance(before, after, late_request_s=0.02, late_work_s=0.05)
    assert found.wanted_step_s == pytest.approx(0.5)
    assert found.late_step_s == pytest.approx(0.02)
    assert found.late_relay_s == pytest.approx(0.01)
    assert found.share == pytest.approx((0.02 + 0.01 + 0.02 + 0.05) / 0.5)
    assert "20.0% of a step of 500 ms" in found.describe()


def test_without_a_single_step_nothing_can_be_judged() -> None:
    still = Counters(StepTiming(), relay(0, 0.0))
    assert math.isinf(disturbance(still, still, 0.0, 0.0).share)


async def test_a_probe_takes_samples_while_something_else_runs() -> None:
    async with probe_cpu() as probe:
        await asyncio.to_thread(wait_until, lambda: bool(probe.late_s))
    assert probe.late_s and probe.mean_late_s >= 0.0
    assert CpuProbe().mean_late_s == 0.0 and CpuProbe([0.1, 0.3]).mean_late_s == pytest.approx(0.2)
