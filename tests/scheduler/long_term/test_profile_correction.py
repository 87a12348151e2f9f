from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.deployment import CorrectionSection
from prfaas.scheduler.costs import build_costs
from prfaas.scheduler.long_term.profile_correction import (
    LEAST_PREFILLS,
    STEP,
    WARM_UP,
    ProfileCorrection,
    next_factor,
)
from prfaas.scheduler.plan import find_optimum, with_paces
from prfaas.types import ClusterId, NodeId
from tests.planner.builders import case_study, problem
from tests.scheduler.traffic import Loop

RULES = CorrectionSection()
HOME, A, B = ClusterId("pd"), NodeId("a"), NodeId("b")
ratios = st.floats(0.01, 100.0)


@given(st.floats(0.25, 4.0), st.lists(ratios, max_size=100))
def test_the_factor_is_bounded_and_stays_once_it_fits(factor: float, seen: list[float]) -> None:
    moved = next_factor(factor, [seen], RULES, least=LEAST_PREFILLS)
    assert 1 / RULES.limit <= moved <= RULES.limit
    assert next_factor(moved, [seen], RULES, least=LEAST_PREFILLS) == moved
    if len(seen) < LEAST_PREFILLS:
        assert moved == factor


@given(
    true=st.floats(0.3, 3.5),
    noise=st.lists(st.floats(0.98, 1.02), min_size=9, max_size=40),
    strays=st.lists(ratios, max_size=8),
    start=st.floats(0.25, 4.0),
)
def test_a_minority_of_outliers_changes_little(
    true: float, noise: list[float], strays: list[float], start: float
) -> None:
    seen = [*(true * one for one in noise), *strays]
    moved = next_factor(start, [seen], RULES, least=LEAST_PREFILLS)
    assert moved == pytest.approx(true, rel=0.02 + STEP + 0.01)


def test_it_can_be_turned_off() -> None:
    off = CorrectionSection(correct=False)
    assert next_factor(1.0, [[2.0] * 50], off, least=LEAST_PREFILLS) == 1.0


def answers(
    paces: ProfileCorrection, took_s: float, count: int, node: NodeId = A, stated_s: float = 1.0
) -> None:
    for number in range(count):
        at_s = 100.0 * number
        paces.record_prefill(HOME, node, stated_s, at_s, at_s + took_s)


def test_the_first_prefills_of_a_process_do_not_count() -> None:
    paces = ProfileCorrection(RULES)
    for _ in range(20):  # restarted again and again
        paces.reset_node(A)
        answers(paces, 9.0, WARM_UP)
    assert not paces.factors
    answers(paces, 1.5, LEAST_PREFILLS)
    assert paces.factors == {HOME: 1.5}


def test_short_prefills_are_no_evidence_unless_they_took_long() -> None:
    paces = ProfileCorrection(RULES)
    answers(paces, RULES.least_s, 50, stated_s=RULES.least_s / 2)
    assert not paces.factors
    answers(paces, 10 * RULES.least_s, 50, stated_s=RULES.least_s / 2)
    assert paces.factors == {HOME: pytest.approx(10.0)}


# Nodes -------------------------------------------------------------------------------------------


class Node:
    """A node that serves one prefill after the other."""

    def __init__(self, paces: ProfileCorrection, name: NodeId, slowness: float = 1.0) -> None:
        self.paces = paces
        self.name = name
        self.slowness = slowness

    def prefill(self, now_s: float, stated_s: float = 1.0) -> float:
        """Returns when it ends."""
        end_s = now_s + self.slowness * stated_s
        self.paces.record_prefill(HOME, self.name, stated_s, now_s, end_s)
        return end_s


def test_a_slow_node_is_known_within_ten_prefills_and_its_cluster_is_not_slow() -> None:
    paces = ProfileCorrection(RULES)
    slow, fast = Node(paces, A, 20.0), Node(paces, B)
    now_s, count = 0.0, 0
    while A not in paces.paces:
        count += 1
        now_s = fast.prefill(slow.prefill(now_s))
    assert WARM_UP < count <= 10
    assert paces.paces == {A: pytest.approx(20.0, rel=0.15)}
    for _ in range(LEAST_PREFILLS):
        now_s = fast.prefill(now_s)
    assert paces.factors.get(HOME, 1.0) == 1.0


def test_a_slow_node_is_slow_beside_nodes_whose_prefills_are_too_short_to_measure() -> None:
    """Those are no evidence of a time, but of being no slower than stated."""
    paces = ProfileCorrection(RULES)
    slow, fast = Node(paces, A, 20.0), Node(paces, B)
    brief_s, now_s = RULES.least_s / 2, 0.0
    for _ in range(2 * LEAST_PREFILLS):
        now_s = fast.prefill(slow.prefill(now_s, brief_s), brief_s)
    assert paces.factors.get(HOME, 1.0) == 1.0
    # Beside overheads, the slowness that is seen is a half of it.
    assert paces.paces == {A: pytest.approx(10.0, rel=0.15)}


@given(st.floats(0.72, 1.38), st.lists(st.floats(0.95, 1.05), min_size=60, max_size=60))
def test_nodes_that_are_about_alike_have_no_pace_of_their_own(
    other: float, noise: list[float]
) -> None:
    paces = ProfileCorrection(RULES)
    now_s = 0.0
    for place, factor in enumerate(noise):
        node = Node(paces, *((A, factor), (B, factor * other))[place % 2])
        now_s = node.prefill(now_s)
        assert not paces.paces


def test_one_good_prefill_shows_that_a_node_has_recovered() -> None:
    paces = ProfileCorrection(RULES)
    slow, fast = Node(paces, A, 20.0), Node(paces, B)
    now_s = 0.0
    for _ in range(8):
        now_s = fast.prefill(slow.prefill(now_s))
    assert A in paces.paces
    slow.slowness = 1.0
    slow.prefill(now_s)
    assert not paces.paces


def never_busy(node: NodeId) -> bool:
    return False


def test_slowness_is_not_doubted_while_the_node_has_yet_to_end_a_prefill() -> None:
    paces = ProfileCorrection(RULES)
    slow, fast = Node(paces, A, 20.0), Node(paces, B)
    now_s = 0.0
    for _ in range(8):
        now_s = fast.prefill(slow.prefill(now_s))
    known = paces.paces[A]
    for _ in range(60):
        now_s = fast.prefill(now_s)
        paces.doubt_old(now_s, lambda node: node == A)
    assert paces.paces == {A: known}


def test_slowness_that_is_not_observed_is_doubted_and_one_prefill_shows_it_again() -> None:
    paces = ProfileCorrection(RULES)
    slow, fast = Node(paces, A, 20.0), Node(paces, B)
    now_s = 0.0
    for _ in range(8):
        now_s = fast.prefill(slow.prefill(now_s))
    believed = [paces.paces[A]]
    until_s = now_s + 60.0
    while paces.paces and now_s < until_s:
        now_s = fast.prefill(now_s)
        paces.doubt_old(now_s, never_busy)
        if paces.paces.get(A, 1.0) != believed[-1]:
            believed.append(paces.paces.get(A, 1.0))
    assert believed == sorted(believed, reverse=True) and believed[-1] == 1.0
    assert now_s < until_s, "within a minute it gets requests again"
    slow.prefill(now_s)
    assert paces.paces == {A: pytest.approx(20.0, rel=0.15)}


def test_a_cluster_that_gets_no_prefills_because_it_was_slow_is_tried_again() -> None:
    paces = ProfileCorrection(RULES)
    only, now_s = Node(paces, A, 50.0), 0.0
    for _ in range(WARM_UP + LEAST_PREFILLS):
        now_s = only.prefill(now_s)
    assert paces.factors == {HOME: 50.0}
    for _ in range(60):
        now_s += 1.0
        paces.doubt_old(now_s, never_busy)
    assert paces.factors == {HOME: 2.0}, "that may be true, and hardly keeps requests away"
    now_s = only.prefill(now_s)
    assert paces.factors == {HOME: 50.0}
    only.slowness = 1.0
    for _ in range(LEAST_PREFILLS):
        now_s = only.prefill(now_s)
    assert paces.factors == {HOME: 1.0}


def test_a_restarted_node_has_no_history() -> None:
    paces = ProfileCorrection(RULES)
    slow, fast = Node(paces, A, 20.0), Node(paces, B)
    now_s = 0.0
    for _ in range(8):
        now_s = fast.prefill(slow.prefill(now_s))
    paces.reset_node(A)
    assert not paces.paces


@given(st.lists(st.floats(0.1, 5.0), min_size=30, max_size=30), st.floats(0.5, 3.0))
def test_time_in_the_queue_is_not_prefill_time(works: list[float], slow: float) -> None:
    """All are sent at once; the node takes one after the other."""
    paces = ProfileCorrection(RULES)
    now = 0.0
    for work in works:
        now += slow * work
        assert paces.record_prefill(HOME, A, work, 0.0, now) == pytest.approx(slow * work, abs=1e-6)
    # A factor moves where the truth is off by more than the step, as a share of the factor.
    assert slow == pytest.approx(paces.factors.get(HOME, 1.0), rel=STEP + 1e-3)


def test_nodes_of_a_cluster_share_a_factor() -> None:
    paces = ProfileCorrection(RULES)
    answers(paces, 2.0, 20, A)
    before = paces.factors
    answers(paces, 2.0, 20, B)
    assert before == paces.factors == {HOME: 2.0}


def test_costs_and_problem_follow() -> None:
    stated = problem()
    costs = build_costs(stated, 5000)
    (far, near) = (ClusterId(pool.cluster) for pool in stated.pools)
    slow = costs.paced({near: 1.5})
    assert slow.prefill_s[near](700, 0) == pytest.approx(1.5 * costs.prefill_s[near](700, 0))
    assert slow.prefill_s[far] is costs.prefill_s[far]
    assert slow.paced({}).prefill_s == costs.prefill_s
    paced = with_paces(stated, {near: 1.5})
    assert float(paced.local.pool.profile.seconds(700)) == pytest.approx(
        slow.prefill_s[near](700, 0)
    )
    assert with_paces(paced, {near: 1.5}) == paced, "not slower and slower"
    assert with_paces(paced, {}) == stated


def test_the_long_term_loop_plans_for_the_observed_pace() -> None:
    stated = case_study()
    local = ClusterId(stated.local.pool.cluster)
    loop = Loop(stated, paces={local: 1.6})
    loop.serve(stated.workload, 3 * 3600.0)
    best = find_optimum(replace(with_paces(stated, {local: 1.6}), workload=stated.workload))
    assert loop.plan.threshold_tokens == pytest.approx(best.threshold_tokens, rel=0.1)
    assert loop.plan.capacity_rps == pytest.approx(best.capacity_rps, rel=0.05)
    assert loop.plan.threshold_tokens != pytest.approx(loop.plans[0].threshold_tokens, rel=0.1)
    assert "pace of prefills" in loop.plans[1].reason
    loop.paces = {}
    loop.serve(stated.workload, 3600.0)
    assert loop.plan.threshold_tokens == pytest.approx(loop.plans[0].threshold_tokens, rel=0.1)
