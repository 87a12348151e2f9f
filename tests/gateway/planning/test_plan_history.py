from __future__ import annotations

import logging

import pytest

from prfaas.gateway.planning.plan_history import PlanHistory
from tests.scheduler.homes.networks import EAST, PLANS


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
    history.record_plan(EAST, PLANS[EAST])
    history.record_no_plan("no node decodes")
    assert len(warnings()) == 3
