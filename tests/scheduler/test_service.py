"""How well a PD cluster is served, and the words for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.scheduler.plan import Plan
from prfaas.scheduler.service import ClusterNodes, Service, judge_service, why_no_prefill_at
from prfaas.types import ClusterId, NodeId
from tests.scheduler.views import FAR, NEAR, PLAN

DECODE_ONLY: Plan = replace(PLAN, roles={NodeId(f"near-{i}"): "decode" for i in range(3)})
NO_CAPACITY = replace(DECODE_ONLY, capacity_rps=0.0)
HERE = ClusterNodes(NEAR, prefilling=0, decoding=3)
THERE = ClusterNodes(FAR, prefilling=2)
NOT_USED = "no node of near is in use"
ALONE = "and near has no prefill node in use: decode nodes prefill for themselves"


def test_a_home_with_a_remote_or_a_local_prefill_node_is_served() -> None:
    assert judge_service(HERE, [THERE], DECODE_ONLY) == Service("served")
    lost = THERE._replace(prefilling=0, others={"lost": 2})
    assert judge_service(HERE._replace(prefilling=1), [lost], PLAN) == Service("served")
    other = THERE._replace(cluster=ClusterId("other"))
    assert judge_service(HERE, [lost, other], DECODE_ONLY) == Service("served")


@pytest.mark.parametrize(
    ("remote", "why"),
    [
        (THERE._replace(drained=True), "the PrfaaS cluster far is drained"),
        (ClusterNodes(FAR, others={"lost": 1}), "no node of far prefills: its only node is lost"),
        (ClusterNodes(FAR, others={"lost": 2}), "no node of far prefills: both are lost"),
        (ClusterNodes(FAR), "no node of far prefills: it has none"),
        (THERE._replace(link_up=False), "the link from far to near is cut"),
    ],
)
def test_without_a_prefill_node_decode_nodes_prefill_for_themselves(
    remote: ClusterNodes, why: str
) -> None:
    assert why_no_prefill_at(remote, NEAR) == why
    found = judge_service(HERE, [remote], DECODE_ONLY)
    assert found == Service("degraded", f"{why}, {ALONE}")


def test_several_remotes_are_all_named() -> None:
    cut = THERE._replace(cluster=ClusterId("other"), link_up=False)
    (found,) = {judge_service(HERE, [THERE._replace(drained=True), cut], DECODE_ONLY).reason}
    assert found.startswith("the PrfaaS cluster far is drained and the link from other to near is")


def test_a_lost_local_prefill_node_degrades_and_a_plan_without_any_does_not() -> None:
    here = HERE._replace(others={"lost": 1})
    assert judge_service(here, [], PLAN).level == "degraded", "the plan has prefill nodes"
    assert judge_service(here, [], DECODE_ONLY) == Service("served"), "this is the plan"


def test_a_plan_with_capacity_0_is_told_and_nodes_that_answer_are_used() -> None:
    found = judge_service(HERE, [THERE], NO_CAPACITY)
    assert found == Service("degraded", "the plan of near has capacity 0")


@pytest.mark.parametrize(
    ("home", "why"),
    [
        (ClusterNodes(NEAR, 1), "its only node prefills"),
        (ClusterNodes(NEAR, 2), "both prefill"),
        (
            ClusterNodes(NEAR, 1, others={"lost": 2, "waiting for a role": 1}),
            "2 are lost, 1 is waiting for a role, 1 prefills",
        ),
    ],
)
def test_without_a_decode_node_prefill_nodes_decode(home: ClusterNodes, why: str) -> None:
    reason = f"no node of near decodes: {why}: prefill nodes decode as well"
    assert judge_service(home, [THERE], PLAN) == Service("degraded", reason)


@pytest.mark.parametrize(
    ("home", "why"),
    [
        (ClusterNodes(NEAR, others={"lost": 3}), f"{NOT_USED}: all 3 are lost"),
        (
            ClusterNodes(NEAR, others={"lost": 1}),
            "no node of near is in use: its only node is lost",
        ),
        (
            ClusterNodes(NEAR, others={"lost": 2, "restarting": 1}),
            f"{NOT_USED}: 2 are lost, 1 is restarting",
        ),
        (ClusterNodes(NEAR), f"{NOT_USED}: it has none"),
        (ClusterNodes(NEAR, others={"unused": 3}, drained=True), "near is drained"),
    ],
)
def test_without_a_node_nothing_is_served(home: ClusterNodes, why: str) -> None:
    assert judge_service(home, [THERE], PLAN) == Service("unserved", why)
    found = judge_service(home, [THERE], PLAN, [ClusterId("west")])
    assert found == Service("degraded", f"{why}: requests of near decode at west")


def test_a_home_without_a_plan_is_not_served() -> None:
    lost = ClusterNodes(NEAR, others={"lost": 2})
    found = judge_service(lost, [THERE], None).reason
    assert found == "near has no plan yet, and no node of near is in use: both are lost"
    assert judge_service(HERE, [THERE], None) == Service("unserved", "near has no plan yet")
    helped = judge_service(HERE, [THERE], None, [ClusterId("west")])
    assert helped.level == "degraded"
