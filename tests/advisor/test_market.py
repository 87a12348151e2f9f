from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.advisor import bounds
from prfaas.advisor.answer import advise
from prfaas.advisor.market import Market, Supply
from prfaas.advisor.search import Search
from prfaas.advisor.size_limit import within_limit
from prfaas.advisor.traffic import mu_for_mean, truncated_mean
from prfaas.advisor.work import TrafficWork, coarsened
from prfaas.errors import InputError
from prfaas.planner.workload import lognormal
from tests.advisor.situations import small_market, with_rate


@pytest.mark.parametrize(
    "supply",
    [
        Supply("h20", "here", 1.5),
        Supply("h20", "here", 1.5, owned=8),
        Supply("h20", "here", 1.5, owned=8, owned_usd=0.4),
        Supply("h20", "here", None, owned=8, owned_usd=0.4),
        Supply("h20", "here", 1.5, owned=8, owned_usd=2.0),
    ],
    ids=["bought", "owned", "owned with a cost", "owned only", "owned but dear"],
)
def test_money_pays_for_what_it_costs(supply: Supply) -> None:
    for usd in (0.0, 1.0, 3.2, 4.0, 12.34, 100.0):
        gpus = float(supply.most_gpus(np.array(usd)))
        assert float(supply.cost(np.array(gpus))) <= usd + 1e-6
        assert float(supply.cost(np.array(gpus + 1))) > usd
        assert bounds.largest_gpus(supply, usd) >= gpus - 1e-6


def test_no_deployment_exceeds_its_bound() -> None:
    for market in (
        small_market(budget=17.0),
        small_market(budget=9.0, owned=5),
        with_rate(small_market(owned=3), 4.0),
    ):
        search = Search(replace(market, workload=coarsened(market.workload, 256)))
        counted = 0
        for pair in search.pairs():
            option = search._counts.pair(pair.here, pair.there, pair.link, None)
            if option is None:
                continue
            counted += 1
            if market.budget_usd is not None:
                assert option.rate_rps <= pair.bound * (1 + 1e-9)
            else:
                assert option.usd_per_hour >= pair.bound - 1e-9
        assert counted > 4


def test_coarse_workloads_keep_means_and_whole_lengths() -> None:
    fine = lognormal(9.0, 1.0, 16, 131_072, output_tokens=100, cached_tokens=512)
    rough = coarsened(fine, 1024)
    assert len(rough.new) <= 1025
    assert rough.mean_new_tokens == pytest.approx(fine.mean_new_tokens, rel=1e-4)
    assert float(rough.weight.sum()) == pytest.approx(1.0)
    assert np.all(rough.new == np.round(rough.new)) and np.all(np.diff(rough.new) >= 0)
    assert np.all(rough.cached == 512)
    assert coarsened(rough, 4096) is rough


def test_the_mean_of_a_prompt_is_that_after_truncation() -> None:
    mu = mu_for_mean(27_000, 1.0, 16, 131_072)
    fine = lognormal(mu, 1.0, 16, 131_072, output_tokens=1)
    assert fine.mean_new_tokens == pytest.approx(27_000, rel=1e-4)
    assert truncated_mean(mu, 1.0, 16, 131_072) == pytest.approx(27_000)
    for impossible in (10, 200_000):
        with pytest.raises(InputError, match="prompt-tokens"):
            mu_for_mean(impossible, 1.0, 16, 131_072)


@pytest.mark.parametrize(
    ("market", "field"),
    [
        (small_market(budget=1e9), "budget_usd_per_hour"),
        (with_rate(small_market(), 1e12), "rate_rps"),
    ],
    ids=["budget", "rate"],
)
def test_questions_that_are_too_large_are_refused(market: Market, field: str) -> None:
    with pytest.raises(InputError) as refused:
        advise(market)
    assert refused.value.where == field


def test_builds_of_which_a_rate_needs_too_many_are_left_out() -> None:
    market = with_rate(small_market(), 1.0)
    traffic = TrafficWork(coarsened(market.workload), market.spec)
    assert within_limit(market, traffic) == market
    kept = {
        len(within_limit(with_rate(market, rate), traffic).places) for rate in range(1, 9000, 30)
    }
    assert kept == {8, 6, 4, 2}
