from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.config.deployment import ReplanSection
from prfaas.planner import baselines
from prfaas.planner.alone import SPLIT_SHARE, alone_rps
from prfaas.planner.comparison import Planner
from prfaas.planner.workload import Workload, lognormal
from prfaas.scheduler.plan import Solver, find_optimum, with_instances
from prfaas.types import NodeId
from tests.planner.builders import case_study, problem
from tests.scheduler.traffic import Loop

CASE_STUDY = case_study()
HOUR_S = 3600.0


def prompts(mu: float, *, output_tokens: float = 1024, cached_tokens: int = 0) -> Workload:
    return lognormal(
        mu, 1.0, 128, 131_072, output_tokens=output_tokens, cached_tokens=cached_tokens
    )


SHORT, LONG = prompts(8.6), prompts(10.8)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.grid) for seed in (1, 2))]
)
def test_short_to_long_and_back_reaches_each_phases_optimum_without_oscillation(seed: int) -> None:
    loop = Loop(CASE_STUDY, seed=seed)
    for phase in (SHORT, LONG, SHORT):
        loop.conversions.clear()
        loop.serve(phase, 1.5 * HOUR_S)
        here = replace(CASE_STUDY, workload=phase)
        best = Planner(here, "exact").solve(here)
        assert best.threshold_tokens is not None
        assert loop.plan.threshold_tokens == pytest.approx(best.threshold_tokens, rel=0.05)
        assert loop.plan.n_prefill == best.n_prefill
        assert loop.plan.capacity_rps == pytest.approx(best.lambda_max_rps, rel=0.05)
        assert loop.conversions, "these phases differ by more than a threshold"
        assert max(Counter(loop.conversions).values()) == 1


def test_longer_answers_turn_prefill_nodes_into_decode_nodes() -> None:
    loop = Loop(CASE_STUDY)
    chatty = prompts(9.9, output_tokens=2000)
    loop.serve(chatty, HOUR_S, rps=2.0)
    assert loop.plan.n_prefill == find_optimum(replace(CASE_STUDY, workload=chatty)).n_prefill
    assert loop.plan.n_prefill < loop.plans[0].n_prefill


def test_a_cached_prefix_counts() -> None:
    loop = Loop(CASE_STUDY)
    warm = prompts(9.9, cached_tokens=60_000)
    loop.serve(warm, HOUR_S)
    best = find_optimum(replace(CASE_STUDY, workload=warm))
    assert loop.plan.threshold_tokens == pytest.approx(best.threshold_tokens, rel=0.05)
    assert best.threshold_tokens != pytest.approx(loop.plans[0].threshold_tokens, rel=0.1)


def test_warm_up_is_ignored() -> None:
    loop = Loop(CASE_STUDY, rules=ReplanSection(warmup_s=HOUR_S))
    loop.serve(LONG, HOUR_S)
    assert len(loop.plans) == 1


def test_too_little_traffic_changes_nothing() -> None:
    loop = Loop(CASE_STUDY)
    loop.serve(LONG, HOUR_S, rps=0.05)
    assert len(loop.plans) == 1


def test_a_fixed_split_and_threshold_stay() -> None:
    pinned = replace(
        CASE_STUDY,
        fixed_threshold=20_000,
        local=replace(CASE_STUDY.local, fixed_prefill=3),
    )
    loop = Loop(pinned)
    loop.serve(SHORT, HOUR_S)
    assert loop.plan.n_prefill == 3
    assert not loop.conversions


def test_without_a_remote_cluster_there_is_no_threshold_to_move() -> None:
    alone = baselines.homogeneous(CASE_STUDY)
    assert alone is not None
    loop = Loop(alone)
    loop.serve(CASE_STUDY.workload, HOUR_S)
    assert len(loop.plans) == 1
    loop.serve(SHORT, HOUR_S)
    assert loop.conversions, "roles still follow the traffic"


def test_roles_wait_for_traffic_to_settle() -> None:
    """Traffic that changes with every block never looks steady: the threshold moves, no node
    does."""
    rules = ReplanSection(every_s=140.0, block_requests=400)
    loop = Loop(CASE_STUDY, rules)
    for _ in range(6):
        loop.serve(SHORT, 140.0)
        loop.serve(LONG, 140.0)
    assert len(loop.plans) > 1
    assert not loop.conversions


def test_lost_and_recovered_prfaas_nodes_move_the_threshold_at_once() -> None:
    loop = Loop(CASE_STUDY)
    loop.serve(CASE_STUDY.workload, 240.0)
    before = loop.plan.threshold_tokens
    loop.serve(CASE_STUDY.workload, 120.0, live_remotes=(2,))
    assert loop.plan.threshold_tokens > before
    assert loop.plan.problem.remotes[0].pool.instances == 2
    assert not loop.conversions, "an outage that ends soon converts no node"
    loop.serve(CASE_STUDY.workload, 120.0)
    assert loop.plan.threshold_tokens == pytest.approx(before, rel=0.15)
    loop.serve(CASE_STUDY.workload, HOUR_S, live_remotes=(1,))
    assert loop.conversions, "one that lasts does"


@pytest.mark.parametrize(
    ("pd", "t_decode_s", "converts"),
    # A split of 2 nodes: 1 and 1, as long as a prefill takes about as long as its share of decode
    # steps. Of 4 nodes, 3 would have to prefill, and they are converted one by one.
    [(2, 0.055, True), (2, 0.02, False), (4, 0.02, False)],
)
def test_nodes_that_serve_alone_become_a_split_only_where_it_serves_nearly_as_much(
    pd: int, t_decode_s: float, converts: bool
) -> None:
    """All PrfaaS nodes are lost for good, and no local node prefills."""
    given = problem(pd=pd, t_decode_s=t_decode_s, fixed_prefill=0)
    loop = Loop(given)
    given = replace(given, local=replace(given.local, fixed_prefill=None))
    loop.plan = replace(loop.plan, problem=given)
    loop.serve(given.workload, HOUR_S, live_remotes=(0,))
    assert loop.plan.capacity_rps >= SPLIT_SHARE * alone_rps(with_instances(given, [0], pd))
    assert bool(loop.conversions) == converts == (loop.plan.n_prefill > 0)


def test_a_lost_node_keeps_its_role_but_does_not_count() -> None:
    loop = Loop(CASE_STUDY)
    dead = loop.nodes[0]
    assert loop.plan.roles[dead] == "prefill"
    loop.serve(CASE_STUDY.workload, 120.0, live_local=set(loop.nodes) - {dead})
    assert loop.plan.roles[dead] == "prefill"
    assert loop.plan.problem.local.pool.instances == len(loop.nodes) - 1


@pytest.mark.slow
@settings(max_examples=12)
@given(
    mu=st.floats(8.0, 11.0),
    output_tokens=st.floats(200, 3000),
    seed=st.integers(0, 1000),
)
def test_steady_traffic_converts_no_node_twice(mu: float, output_tokens: float, seed: int) -> None:
    loop = Loop(CASE_STUDY, rules=ReplanSection(every_s=300.0), seed=seed)
    workload = prompts(mu, output_tokens=output_tokens)
    loop.serve(workload, 2 * HOUR_S)
    counts = Counter(loop.conversions)
    assert not counts or max(counts.values()) == 1
    best = find_optimum(replace(CASE_STUDY, workload=workload))
    here = Solver(replace(CASE_STUDY, workload=workload)).best(loop.plan.n_prefill)
    assert here.capacity_rps >= 0.95 * best.capacity_rps


@settings(max_examples=30)
@given(
    alive=st.integers(0, 4),
    remote=st.integers(0, 2),
    mu=st.floats(5.0, 8.0),
)
def test_any_hardware_gives_a_plan_for_the_live_nodes_or_none(
    alive: int, remote: int, mu: float
) -> None:
    small = problem(prfaas=2, pd=4)
    loop = Loop(small, rules=ReplanSection(block_requests=100, warmup_s=0))
    live: set[NodeId] = set(loop.nodes[:alive])
    traffic = lognormal(mu, 1.0, 20, 5000, output_tokens=100)
    loop.serve(traffic, 600.0, live_remotes=(remote,), live_local=live or frozenset({NodeId("?")}))
    assert set(loop.plan.roles) == set(loop.nodes)
    assert loop.plan.threshold_tokens >= 0
    assert all(share >= 0 for share in loop.plan.shares)
