from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from prfaas.config.deployment import ReplanSection
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.scheduler.plan import Plan, first_plan
from prfaas.types import NodeId
from tests.gateway.fleets import PD
from tests.planner.builders import problem

A, B = NodeId("a"), NodeId("b")


def plan(threshold_tokens: int = 100) -> Plan:
    made = first_plan(problem(pd=2), [A, B], ReplanSection())
    roles = {A: "prefill", B: "decode"}
    return replace(made, threshold_tokens=threshold_tokens, roles=roles, reason="why")


def samples(history: PlanHistory, followed: Plan | None) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("role", "")): sample.value
        for metric in history.metrics(followed)
        for sample in metric.samples
    }


def test_plans_and_conversions_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    history = PlanHistory(advises=False)
    history.record_plan(PD, plan())
    history.record_conversion(B, "prefill", 3.0)
    assert caplog.messages == [
        "new plan of pd: threshold 100 tokens, 1 prefill and 1 decode nodes (why)",
        "b: its role is prefill now",
    ]
    found = samples(history, {PD: plan()})
    assert found["prfaas_gateway_plans_total", ""] == 1
    assert found["prfaas_gateway_conversions_total", "prefill"] == 1
    assert found["prfaas_gateway_conversions_total", "decode"] == 0
    assert found["prfaas_gateway_plan_threshold_tokens", ""] == 100
    assert found["prfaas_gateway_plan_nodes", "decode"] == 1
    assert not any("advice" in name for name, _ in found)


def test_advice_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    history = PlanHistory(advises=True)
    history.record_advice({})
    for threshold in (200, 200, 300):
        history.record_advice({PD: replace(plan(threshold), made_s=float(len(caplog.messages)))})
    assert samples(history, {})["prfaas_gateway_advice_threshold_tokens", ""] == 300
    history.record_advice({})
    assert [message.split(",")[0] for message in caplog.messages] == [
        "advice for pd",
        "advice for pd",
        "advice withdrawn: the plan in force of pd is good",
    ]
    assert "300 tokens" in caplog.messages[1]
    assert not any("advice" in name for name, _ in samples(history, {PD: plan()}))


def test_the_same_reason_for_no_plan_is_logged_once_until_there_is_a_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    history = PlanHistory(advises=False)

    def warnings() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]

    for reason in ("no node prefills", "no node prefills", "no node decodes"):
        history.record_no_plan(reason)
    assert [text.rpartition(": ")[2] for text in warnings()] == [
        "no node prefills",
        "no node decodes",
    ]
    history.record_plan(PD, plan())
    history.record_no_plan("no node decodes")
    assert len(warnings()) == 3
