"""The plan of several clusters: against exhaustive search, a mixed-integer programme, and the
planner of one PD cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import pytest

from prfaas.errors import InputError
from prfaas.planner.comparison import Planner
from prfaas.planner.curves import Reading
from prfaas.planner.network.plan import NetworkPlan
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.workload import lognormal
from tests.planner import builders
from tests.planner.network.builders import random_network
from tests.planner.network.exhaustive import brute_force, mixed_integer

READINGS: tuple[Reading, ...] = ("paper", "exact")


def up_to_two_by_two(seed: int) -> NetworkProblem:
    rng = np.random.default_rng(seed)
    return random_network(rng, int(rng.integers(1, 3)), int(rng.integers(1, 3)))


def check(problem: NetworkProblem, plan: NetworkPlan) -> None:
    """Every stage and link bears the plan, all traffic has a place, and something is at its
    limit."""
    used = [home.prefill_utilisation for home in plan.homes]
    used += [home.decode_utilisation for home in plan.homes]
    used += [prfaas.utilisation for prfaas in plan.prfaas]
    used += [flow.utilisation for flow in plan.flows]
    assert max(used) <= 1 + 1e-8
    assert plan.binding and plan.gap < 1e-8
    assert sum(home.rate_rps for home in plan.homes) == pytest.approx(plan.rate_rps)
    for home, stated in zip(plan.homes, problem.homes, strict=True):
        assert home.n_prefill + home.n_decode == stated.problem.local.pool.instances
        flows = plan.flows_to(home.cluster)
        names = [remote.pool.cluster for remote in stated.problem.remotes]
        assert [flow.source for flow in flows] == names
        sent = sum(flow.rps for flow in flows)
        assert sent == pytest.approx(home.rate_rps * home.offload_fraction, abs=1e-9)
    for prfaas in plan.prfaas:
        sent = sum(flow.rps for flow in plan.flows if flow.source == prfaas.cluster)
        assert prfaas.rate_rps == pytest.approx(sent)


def check_rate(
    problem: NetworkProblem,
    plan: NetworkPlan,
    largest: Callable[[NetworkProblem, Reading, Collection[str]], float],
    rel: float,
) -> None:
    """The plan has the largest rate with its prefill instances. This rate is at least 0.98 of the
    largest of all, and no further home could have a prefill instance for that."""
    best = largest(problem, plan.reading, ())
    able = {home.cluster for home in problem.homes if home.problem.local.fixed_prefill is None}
    able -= {home.cluster for home in problem.homes if home.problem.local.pool.instances == 1}
    prefilling = {home.cluster for home in plan.homes if home.n_prefill} & able
    assert plan.rate_rps == pytest.approx(largest(problem, plan.reading, prefilling), rel=rel)
    assert plan.rate_rps >= 0.98 * best * (1 - rel)
    for cluster in able - prefilling:
        assert largest(problem, plan.reading, {*prefilling, cluster}) < 0.98 * best * (1 + rel)


def compare_with_brute_force(seeds: range) -> None:
    for seed in seeds:
        problem = up_to_two_by_two(seed)
        for reading in READINGS:
            plan = NetworkPlanner(reading).solve(problem)
            check_rate(problem, plan, brute_force, rel=1e-6)
            check(problem, plan)


def compare_with_mixed_integer(seeds: range) -> None:
    for seed in seeds:
        problem = random_network(np.random.default_rng(seed), 3, 3)
        for reading in READINGS:
            plan = NetworkPlanner(reading).solve(problem)
            check_rate(problem, plan, mixed_integer, rel=1e-4)
            check(problem, plan)


def test_no_thresholds_and_splits_are_better() -> None:
    compare_with_brute_force(range(1000, 1003))


def test_the_mixed_integer_programme_agrees() -> None:
    compare_with_mixed_integer(range(1000, 1001))


@pytest.mark.slow
def test_forty_deployments_against_brute_force() -> None:
    compare_with_brute_force(range(40))


@pytest.mark.grid
@pytest.mark.timeout(300)
def test_two_hundred_deployments_against_brute_force() -> None:
    compare_with_brute_force(range(40, 200))


@pytest.mark.slow
def test_twenty_deployments_against_a_mixed_integer_programme() -> None:
    compare_with_mixed_integer(range(20))


@pytest.mark.parametrize("reading", READINGS)
def test_the_case_study_has_the_plan_of_one_pd_cluster(reading: Reading) -> None:
    one = builders.case_study()
    plan = NetworkPlanner(reading).solve(NetworkProblem((Home(1.0, one),)))
    expected = Planner(one, reading).solve(one)
    (home,), (flow,) = plan.homes, plan.flows
    assert plan.rate_rps == pytest.approx(expected.lambda_max_rps, rel=1e-12)
    assert home.threshold_tokens == expected.threshold_tokens
    assert (home.n_prefill, home.n_decode) == (expected.n_prefill, expected.n_decode)
    assert home.offload_fraction == expected.offload_fraction
    assert flow.bps == pytest.approx(expected.egress_bps, rel=1e-12)
    assert expected.bottleneck in {binding.stage for binding in plan.binding}


@pytest.mark.parametrize("seed", range(4))
def test_one_pd_cluster_has_the_same_plan_as_before(seed: int) -> None:
    """Few lengths and many, one PrfaaS cluster and several."""
    rng = np.random.default_rng(seed)
    problem = random_network(rng, 1, int(rng.integers(1, 4)))
    if seed % 2:
        smooth = lognormal(rng.uniform(5, 8), rng.uniform(0.3, 1.3), 20, 8000, output_tokens=60)
        problem = problem.with_homes(lambda one: replace(one, workload=smooth))
    one = problem.homes[0].problem
    for reading in READINGS:
        plan = NetworkPlanner(reading).solve(problem)
        expected = Planner(one, reading).solve(one)
        (home,) = plan.homes
        assert plan.rate_rps == pytest.approx(expected.lambda_max_rps, rel=1e-12)
        assert home.n_prefill == expected.n_prefill
        assert home.threshold_tokens == expected.threshold_tokens
        if home.offload_fraction:
            shares = [flow.share for flow in plan.flows]
            assert shares == pytest.approx(list(expected.shares), abs=1e-6)


def pair(**changes: object) -> NetworkProblem:
    """Two equal PD clusters that share a PrfaaS cluster of twice the size, with a path each."""
    one = builders.problem(prfaas=4, **changes)  # type: ignore[arg-type]
    local = replace(one.local, pool=replace(one.local.pool, cluster="other"))
    return NetworkProblem((Home(0.5, one), Home(0.5, replace(one, local=local))))


@pytest.mark.parametrize("reading", READINGS)
def test_two_equal_halves_serve_twice_as_much(reading: Reading) -> None:
    half = builders.problem(prfaas=2, bps=1e9)
    whole = NetworkPlanner(reading).solve(pair(bps=1e9))
    single = Planner(half, reading).solve(half)
    assert whole.rate_rps == pytest.approx(2 * single.lambda_max_rps, rel=1e-9)
    first, second = whole.homes
    assert first.threshold_tokens == second.threshold_tokens == single.threshold_tokens
    assert first.n_prefill == second.n_prefill == single.n_prefill


def test_fixed_splits_and_thresholds_stay_fixed() -> None:
    plan = NetworkPlanner("exact").solve(pair(fixed_prefill=1, fixed_threshold=777))
    for home in plan.homes:
        assert (home.n_prefill, home.threshold_tokens) == (1, 777)


def test_a_pd_cluster_without_a_path_serves_alone_and_may_limit_the_others() -> None:
    problem = pair(bps=1e9)
    homes = (problem.homes[0], replace(problem.homes[1], problem=replace(
        problem.homes[1].problem, remotes=())))  # fmt: skip
    plan = NetworkPlanner("exact").solve(NetworkProblem(homes))
    lone = builders.problem(prfaas=0)
    limit = Planner(lone, "exact").solve(lone).lambda_max_rps
    assert plan.rate_rps == pytest.approx(2 * limit, rel=1e-9)
    helped, alone = plan.homes
    assert alone.offload_fraction == 0 and alone.threshold_tokens is None
    assert {binding.cluster for binding in plan.binding} == {"other"}
    # The home without a bottleneck has reserves everywhere.
    assert helped.prefill_utilisation < 0.9 and helped.decode_utilisation < 0.9
    assert plan.prfaas[0].utilisation < 0.9


@pytest.mark.parametrize("reading", READINGS)
def test_a_pd_cluster_with_hardly_any_traffic_limits_nothing(reading: Reading) -> None:
    first, second = pair(bps=1e9).homes
    alone = NetworkPlanner(reading).solve(NetworkProblem((replace(first, share=1.0),)))
    for share in (1e-6, 1e-9, 1e-30):
        homes = (replace(first, share=1 - share), replace(second, share=share))
        plan = NetworkPlanner(reading).solve(NetworkProblem(homes))
        assert plan.rate_rps == pytest.approx(alone.rate_rps, rel=1e-5)


def test_flows_of_hardly_any_requests_are_balanced() -> None:
    """Nearly every request is shorter than the fixed threshold."""
    rng = np.random.default_rng(2)
    lengths = lognormal(5.0, 0.4, 20, 8000, output_tokens=60)
    problem = random_network(rng, 1, 2).with_homes(
        lambda one: replace(one, workload=lengths, fixed_threshold=2500)
    )
    plan = NetworkPlanner("exact").solve(problem)
    one = problem.homes[0].problem
    expected = Planner(one, "exact").solve(one)
    assert 0 < plan.homes[0].offload_fraction < 1e-9
    assert [flow.share for flow in plan.flows] == pytest.approx(list(expected.shares), abs=1e-6)


def test_a_pd_cluster_that_cannot_prefill_is_named() -> None:
    problem = pair(pd=1)
    second = replace(problem.homes[1], problem=replace(problem.homes[1].problem, remotes=()))
    with pytest.raises(InputError, match="no instance can prefill for other with .* or a link"):
        NetworkPlanner("exact").solve(NetworkProblem((problem.homes[0], second)))
    kept = pair(pd=1, fixed_threshold=500)
    with pytest.raises(InputError, match="for near and other with .* or remove scheduler.thresh"):
        NetworkPlanner("exact").solve(kept)


def test_a_copy_in_another_process_keeps_nothing_of_this_one() -> None:
    """What a planner keeps belongs to ids of objects. Another process gives them to other ones."""
    network = random_network(np.random.default_rng(3), 2, 2)
    planner = NetworkPlanner("exact")
    rate = planner.rate_rps(network)
    copied, other = pickle.loads(pickle.dumps((planner, network)))
    assert not copied._works and not copied._curves
    assert copied.rate_rps(other) == rate


def test_the_number_of_linear_programmes_is_bounded() -> None:
    """8 x 6 clusters with hundreds of instances. A step of the search is one linear programme; a
    search has about 30 steps, and each PD cluster may need one search for its split and one for its
    threshold."""
    problem = random_network(np.random.default_rng(3), 8, 6)
    problem = problem.with_homes(
        lambda one: replace(
            one,
            local=replace(
                one.local, pool=replace(one.local.pool, instances=100), fixed_prefill=None
            ),
            remotes=tuple(
                replace(remote, pool=replace(remote.pool, instances=70)) for remote in one.remotes
            ),
        )
    )
    planner = NetworkPlanner("exact")
    check(problem, planner.solve(problem))
    assert planner.programmes_solved <= 8 * 2 * 30
