from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from prfaas.config.deployment import ReplanSection
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.scheduler.homes.plans import solve_network, with_splits
from prfaas.scheduler.long_term.replan import replan
from prfaas.scheduler.long_term.replan_homes import replan_homes
from prfaas.scheduler.long_term.traffic import TrafficHistory, TrafficWindow
from prfaas.scheduler.plan import first_plan
from prfaas.types import ClusterId
from tests.planner.builders import problem
from tests.scheduler.homes.networks import EAST, NETWORK, NODES, PLANS, SOUTH, WEST, network_with

RULES = ReplanSection()


def windows(
    counts: Mapping[ClusterId, int],
    live: tuple[int, int] = (2, 2),
    lost: ClusterId | None = None,
) -> dict[ClusterId, TrafficWindow]:
    """Requests of each PD cluster's own workload, all after the warm-up."""
    made = {}
    for number, home in enumerate(NETWORK.homes):
        name = ClusterId(home.cluster)
        history = TrafficHistory(0.0, RULES.window_s)
        work, rng = home.problem.workload, np.random.default_rng(number)
        lengths = rng.choice(work.new, counts[name], p=work.weight)
        for at_s, new in zip(np.linspace(200.0, 900.0, counts[name]), lengths, strict=True):
            history.observe(float(at_s), int(new), 0, round(work.output_tokens), 0.0)
        nodes = set() if name == lost else set(NODES[name])
        made[name] = history.window(900.0, live, nodes)
    return made


def test_one_pd_cluster_is_replanned_as_ever() -> None:
    given = problem()
    name = ClusterId("near")
    plan = first_plan(given, NODES[EAST], RULES)
    window = replace(windows({EAST: 900, WEST: 0})[EAST], live_remotes=(1,))
    made, expected = replan_homes({name: window}, {name: plan})[name], replan(window, plan)
    assert expected is not None
    assert replace(made, problem=given) == replace(expected, problem=given)


def test_the_traffic_that_was_planned_for_changes_no_role() -> None:
    new = replan_homes(windows({EAST: 1800, WEST: 1200}), PLANS)
    for name, plan in new.items():
        assert plan.roles == PLANS[name].roles


def test_a_lost_prfaas_cluster_leaves_its_flows_to_the_other() -> None:
    new = replan_homes(windows({EAST: 1800, WEST: 1200}, live=(2, 0)), PLANS)
    assert set(new) == {EAST, WEST}
    for plan in new.values():
        assert plan.shares == (1.0, 0.0)
        assert "nodes came or went" in plan.reason


def test_shifted_traffic_moves_thresholds_or_flows_to_where_it_went() -> None:
    new = replan_homes(windows({EAST: 600, WEST: 2400}), PLANS)
    assert WEST in new
    shifted = NetworkProblem(
        tuple(
            Home(share, home.problem) for share, home in zip((0.2, 0.8), NETWORK.homes, strict=True)
        )
    )
    best = solve_network(shifted)
    assert new[WEST].capacity_rps == pytest.approx(best.home(WEST).rate_rps, rel=0.15)


def test_a_pd_cluster_without_a_live_node_keeps_its_plan() -> None:
    new = replan_homes(windows({EAST: 1800, WEST: 1200}, lost=WEST), PLANS)
    assert WEST not in new


def test_without_traffic_or_lost_nodes_nothing_changes() -> None:
    assert replan_homes(windows({EAST: 10, WEST: 10}), PLANS) == {}


SHARES = {EAST: 0.6, WEST: 0.4}


def test_before_any_traffic_the_stated_shares_count() -> None:
    new = replan_homes(windows({EAST: 0, WEST: 0}, live=(2, 1)), PLANS, SHARES)
    expected = solve_network(
        with_splits(
            network_with(NETWORK, {SOUTH: 1}), {name: PLANS[name].n_prefill for name in PLANS}
        )
    )
    assert set(new) == {EAST, WEST}
    for name, plan in new.items():
        assert plan.capacity_rps == pytest.approx(expected.home(name).rate_rps)


def test_the_full_plan_returns_with_the_nodes_and_their_roles() -> None:
    """A whole PD cluster is lost and returns, without any traffic in the meantime."""
    none = {EAST: 0, WEST: 0}
    alone = replan_homes(windows(none, lost=WEST), PLANS, SHARES)
    assert set(alone) == {EAST}
    assert alone[EAST].capacity_rps > PLANS[EAST].capacity_rps
    assert "nodes came or went" in alone[EAST].reason
    after = {**PLANS, **alone}
    assert replan_homes(windows(none, lost=WEST), after, SHARES) == {}
    back = {**after, **replan_homes(windows(none), after, SHARES)}
    for name, plan in back.items():
        assert plan.roles == PLANS[name].roles
        assert plan.capacity_rps == pytest.approx(PLANS[name].capacity_rps)
        assert plan.shares == pytest.approx(PLANS[name].shares, abs=1e-6)
    assert replan_homes(windows(none), back, SHARES) == {}


def test_without_any_live_pd_cluster_nothing_changes() -> None:
    found = windows({EAST: 0, WEST: 0})
    lost = {name: replace(window, live_local=frozenset()) for name, window in found.items()}
    assert replan_homes(lost, PLANS, SHARES) == {}


def test_lost_nodes_of_a_pd_cluster_return_to_their_roles() -> None:
    found = windows({EAST: 0, WEST: 0})
    fewer = {**found, WEST: replace(found[WEST], live_local=frozenset(NODES[WEST][2:]))}
    after = {**PLANS, **replan_homes(fewer, PLANS, SHARES)}
    assert after[WEST].roles == PLANS[WEST].roles
    assert after[WEST].problem.local.pool.instances == 2
    back = {**after, **replan_homes(found, after, SHARES)}
    for name, plan in back.items():
        assert plan.roles == PLANS[name].roles
        assert plan.capacity_rps == pytest.approx(PLANS[name].capacity_rps)
