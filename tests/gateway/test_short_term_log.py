"""Verdicts, rates and the factor: one line and one metric for each change."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from prfaas.config.deployment import SchedulerSection
from prfaas.gateway.short_term_log import ShortTermLog
from prfaas.scheduler.congestion import LinkHealth, LinkVerdict
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.types import ClusterId

NEAR = ClusterId("near")
OUT = (ClusterId("far"), NEAR)
CALM = ShortTermState(SchedulerSection(), {OUT: LinkState()})


def at(verdict: LinkVerdict, cause: str, bps: float | None = None) -> ShortTermState:
    return replace(CALM, links={OUT: LinkState(LinkHealth(verdict, cause), bps)})


def rendered(subject: ShortTermLog) -> str:
    class Metrics(Collector):
        collect = staticmethod(subject.metrics)

    registry = CollectorRegistry()
    registry.register(Metrics())
    return generate_latest(registry).decode()


def test_every_change_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    subject = ShortTermLog()
    for state in (
        CALM,
        CALM,
        at(LinkVerdict.BUILDING, "waiting"),
        at(LinkVerdict.BUILDING, "waiting", 1e7),
        at(LinkVerdict.BUILDING, "waiting", 1.2e7),  # about the same
        at(LinkVerdict.CONGESTED, "loss", 4e7),
        replace(at(LinkVerdict.CLEAR, ""), threshold_factor=2.0, cause="PrfaaS nodes are busy"),
    ):
        subject.record({NEAR: state})
    assert [record.getMessage() for record in caplog.records] == [
        "link far -> near is building (waiting); it was clear",
        "link far -> near: estimated rate 10 Mbit/s, as delivered while bytes waited",
        "link far -> near is congested (loss); it was building (waiting)",
        "link far -> near: estimated rate 40 Mbit/s, as delivered while bytes waited",
        "link far -> near is clear; it was congested (loss)",
        "link far -> near: estimated rate reset to the configured rate",
        "near: the threshold factor changed to 2 from 1: PrfaaS nodes are busy",
    ]


def test_metrics_have_the_causes() -> None:
    subject = ShortTermLog()
    subject.record({NEAR: CALM})
    assert "prfaas_gateway_threshold_factor_changes_total 0.0" in rendered(subject)
    raised = replace(at(LinkVerdict.BUILDING, "waiting", 5e6), threshold_factor=2.0)
    subject.record({NEAR: raised})
    text = rendered(subject)
    changes = "prfaas_gateway_link_verdict_changes_total"
    labels = 'cause="waiting",source="far",target="near",verdict="building"'
    assert f"{changes}{{{labels}}} 1.0" in text
    assert "prfaas_gateway_threshold_factor_changes_total 1.0" in text
