"""The search gives the choice of exhaustive search over its own model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.advisor.market import Market
from prfaas.advisor.option import Option, problem_of
from prfaas.advisor.search import SHOWN, Found, Search
from prfaas.advisor.work import coarsened
from prfaas.planner.comparison import Planner
from tests.advisor.exhaustive import Choice, Exhaustive
from tests.advisor.situations import SITUATIONS, random_market, small_market, stated, with_rate


def choice_of(option: Option) -> Choice:
    assert option.remote is not None and option.link is not None
    return Choice(
        option.local.place.build.title,
        option.local.instances,
        option.remote.place.build.title,
        option.remote.instances,
        option.link.gbps,
    )


def check_against_all_counts(market: Market, *, exactly: bool = True) -> None:
    search = Search(market)
    found, reference = search.run(), Exhaustive(search.market)
    expected = reference.ranked()
    assert len(found.prfaas) == min(len(expected), SHOWN)
    for option, tried in zip(found.prfaas, expected, strict=False):
        if exactly:
            assert choice_of(option) == tried.choice
        assert (option.gpus, option.instances) == (tried.gpus, tried.instances)
        assert option.rate_rps == pytest.approx(tried.rate_rps, rel=1e-8)
        assert option.usd_per_hour == pytest.approx(tried.usd_per_hour)
    alone = search.best_prfaas()
    assert (alone is None) == (not expected)
    if alone is not None:
        assert alone.rate_rps == pytest.approx(expected[0].rate_rps, rel=1e-8)
        assert alone.usd_per_hour == pytest.approx(expected[0].usd_per_hour)
    cluster = reference.single()
    assert (cluster is None) == (not found.singles)
    if cluster is None:
        return
    rate, usd = cluster
    assert found.singles[0].usd_per_hour == pytest.approx(usd)
    assert found.singles[0].rate_rps == pytest.approx(rate, rel=1e-8)


def coarse(market: Market, atoms: int = 256) -> Market:
    return replace(market, workload=coarsened(market.workload, atoms))


@pytest.mark.parametrize(
    "market",
    [
        small_market(budget=12.0),
        small_market(budget=3.0),
        small_market(budget=6.0, owned=7),
        with_rate(small_market(), 4.0),
        with_rate(small_market(gbps=(0.003,), near_usd=0.7), 3.0),
        with_rate(small_market(owned=5), 2.0),
    ],
    ids=["budget", "little", "owned", "rate", "thin link", "rate and owned"],
)
def test_small_markets(market: Market) -> None:
    check_against_all_counts(coarse(market))


def test_links_that_cost_nothing() -> None:
    """Two of them may serve the same."""
    market = small_market(budget=12.0, near_usd=0.7, far_usd=2.5, link_usd=0.0)
    check_against_all_counts(coarse(market), exactly=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_markets(seed: int) -> None:
    """Not exactly the same choice: some are equal in rate, cost, GPUs and instances."""
    check_against_all_counts(coarse(random_market(seed), 128), exactly=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_stated_situations(name: str) -> None:
    check_against_all_counts(stated(name))


def best(found: Found) -> Option:
    return found.prfaas[0]


def test_more_money_is_never_less_rate() -> None:
    rates = [
        best(Search(coarse(small_market(budget=usd))).run()).rate_rps for usd in (6, 9, 14, 21)
    ]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_a_local_prefill_instance_may_cost_two_percent() -> None:
    """Without one, 96 + 60 GPUs would serve 0.7% more."""
    option = best(Search(stated("hybrid")).run())
    assert option.local_prefill
    problem = problem_of(stated("hybrid"), option)
    assert Planner(problem, "exact").solve(problem).n_prefill == 1


def test_a_faster_link_is_never_less_rate() -> None:
    rates = [
        best(Search(coarse(small_market(gbps=(gbps,)))).run()).rate_rps
        for gbps in (0.002, 0.01, 0.05, 0.2)
    ]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_cheaper_gpus_never_cost_more() -> None:
    costs = [
        best(Search(coarse(with_rate(small_market(far_usd=usd), 4.0))).run()).usd_per_hour
        for usd in (0.8, 1.2, 1.8, 2.6)
    ]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_the_rate_is_the_planners() -> None:
    """Of the best options, and of the single clusters."""
    search = Search(small_market())
    found = search.run()
    for option in (*found.prfaas, *found.singles):
        problem = problem_of(search.market, option)
        solution = Planner(problem, "exact").solve(problem)
        assert option.lambda_max_rps == pytest.approx(solution.lambda_max_rps, rel=1e-8)
        assert option.rate_rps == pytest.approx(solution.lambda_max_rps * 0.8, rel=1e-8)


@pytest.mark.slow
def test_a_coarse_workload_changes_little() -> None:
    market = stated("hybrid")
    option = best(Search(market).run())
    problem = problem_of(market, option)
    assert len(market.workload.new) > 100_000
    solution = Planner(problem, "exact").solve(problem)
    assert option.lambda_max_rps == pytest.approx(solution.lambda_max_rps, rel=2e-3)


def test_options_differ_in_their_accelerators_and_stay_within_the_money() -> None:
    market = small_market(budget=15.0)
    found = Search(market).run()
    pairs = [option.accelerators for option in found.prfaas]
    assert len(pairs) == len(set(pairs)) == 4
    assert [option.rate_rps for option in found.prfaas] == sorted(
        (option.rate_rps for option in found.prfaas), reverse=True
    )
    assert all(option.usd_per_hour <= 15.0 + 1e-9 for option in (*found.prfaas, *found.singles))
    assert found.same is not None and len(set(found.same.accelerators)) == 1
    # The same GPUs for the same money at the other site are not listed again.
    assert [option.local.accelerator for option in found.singles] == ["near", "far"]


def test_owned_gpus_are_used_before_others_are_bought() -> None:
    found = Search(coarse(small_market(budget=0.5, owned=6))).run()
    assert found.singles[0].local.accelerator == "near"
    assert found.singles[0].usd_per_hour == 0.0
    assert not found.prfaas, "nothing there can be paid for"


def test_two_clusters_share_the_traffic_where_gpus_are_owned() -> None:
    market = coarse(small_market(budget=8.0, owned=6))
    found = Search(market).run()
    assert found.separate is not None
    parts = (found.separate.first, found.separate.second)
    assert found.separate.rate_rps == pytest.approx(sum(part.rate_rps for part in parts))
    assert found.separate.usd_per_hour <= 8.0
    assert Search(coarse(small_market(budget=8.0))).run().separate is None
