"""The verdict, its reason, the certainty of a gain, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.advisor.answer import advise
from prfaas.advisor.market import LinkChoice, Market, Place
from prfaas.advisor.report import answer_as_dict
from prfaas.advisor.search import Search
from prfaas.advisor.verdict import WORTH_IT, judge
from prfaas.advisor.work import coarsened
from prfaas.errors import InputError
from prfaas.estimator.uncertainty import EstimateError
from prfaas.planner.problem import LatencyGoal
from tests.advisor.situations import NOT_WORTH_IT, SITUATIONS, small_market, stated, with_rate


def small(**changes: float) -> Market:
    market = small_market(link_usd=0.0, **changes)  # type: ignore[arg-type]
    return replace(market, workload=coarsened(market.workload, 256))


def one_size(market: Market) -> Market:
    """The market without its larger instances."""

    def small_ones(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(place for place in places if place.build.gpus == 1)

    return replace(market, here=small_ones(market.here), there=small_ones(market.there))


@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_stated_situations(name: str) -> None:
    answer = advise(stated(name))
    assert answer.verdict.worth_it == (name not in NOT_WORTH_IT)
    if name in NOT_WORTH_IT:
        assert answer.verdict.reason == NOT_WORTH_IT[name]
        assert answer.verdict.text.startswith("Not worth it: ")
    else:
        assert answer.verdict.gain is not None and answer.verdict.gain >= WORTH_IT
        sure = answer.prfaas[0].certainty
        assert sure is not None
        assert sure.gain.low < sure.gain.median < sure.gain.high and 0 < sure.wins <= 1


def test_a_thin_link_is_the_reason_and_the_stated_bandwidth_pays() -> None:
    market = small(gbps=(0.002,))
    search = Search(market)
    verdict = judge(search, search.run())
    assert (verdict.worth_it, verdict.reason) == (False, "thin link")
    assert verdict.pays_from_gbps is not None

    def gain(gbps: float) -> float:
        found = Search(replace(market, links=(LinkChoice(gbps, 0.01, 0.0),))).run()
        return found.prfaas[0].rate_rps / found.singles[0].rate_rps

    assert gain(verdict.pays_from_gbps) >= WORTH_IT
    assert gain(verdict.pays_from_gbps * 0.9) < WORTH_IT


def test_the_price_of_the_link_is_the_reason() -> None:
    market = small(gbps=(0.2,))
    dear = replace(market, links=(replace(market.links[0], usd_per_hour=12.0),))
    assert advise(market).verdict.worth_it
    verdict = advise(dear).verdict
    assert (verdict.worth_it, verdict.reason) == (False, "price of the link")
    assert "costs $12.00 per hour" in verdict.text


def test_equal_accelerators_are_the_reason() -> None:
    market = one_size(small(near_usd=0.2, far_usd=9.0, budget=40.0))
    verdict = advise(market).verdict
    assert (verdict.worth_it, verdict.reason) == (False, "no cheaper arithmetic")


def test_owned_gpus_suffice() -> None:
    market = with_rate(small(owned=12), 1.0)  # type: ignore[arg-type]
    verdict = advise(market).verdict
    assert (verdict.worth_it, verdict.reason) == (False, "owned GPUs suffice")


def test_nothing_to_offload_to() -> None:
    verdict = advise(replace(small(), there=())).verdict
    assert (verdict.worth_it, verdict.reason) == (False, "nothing to offload to")


def test_costs_and_gains_follow_from_the_rates() -> None:
    market = small(gbps=(0.2,))
    answer = advise(market)
    first, single = answer.prfaas[0], answer.singles[0]
    assert first.gain == pytest.approx(first.option.rate_rps / single.option.rate_rps)
    assert single.gain == single.over_single == 1.0 and first.over_single == first.gain
    tokens = first.option.rate_rps * (market.workload.mean_new_tokens + 100)
    assert first.usd_per_million_tokens == pytest.approx(
        first.option.usd_per_hour / 3600 / tokens * 1e6
    )
    assert first.usd_per_million_output_tokens == pytest.approx(
        first.option.usd_per_hour / 3600 / (first.option.rate_rps * 100) * 1e6
    )
    assert first.option.link is not None
    assert first.used_bps <= first.option.link.bps * market.utilisation * (1 + 1e-9)
    assert first.certainty is None, "none of these times is estimated"
    # With exactly the bandwidth that is needed, the rate stays the same.
    enough = replace(first.option.link, gbps=first.needed_bps / 1e9 * (1 + 1e-9))
    again = advise(replace(market, links=(enough,))).prfaas[0]
    assert again.option.rate_rps == pytest.approx(first.option.rate_rps, rel=1e-6)


@pytest.mark.slow
def test_errors_that_are_shared_do_not_blur_the_gain() -> None:
    market = small(gbps=(0.2,))

    def gain_range(shared: bool) -> float:
        def uncertain(place: Place) -> Place:
            source = "model" if shared else f"accelerator {place.build.accelerator}"
            error = EstimateError(place.build.title, ((source, 0.3),), 0.0)
            return replace(place, build=replace(place.build, prefill_error=error))

        unsure = replace(
            market,
            here=tuple(map(uncertain, market.here)),
            there=tuple(map(uncertain, market.there)),
        )
        sure = advise(unsure).prfaas[0].certainty
        assert sure is not None
        return sure.gain.high - sure.gain.low

    assert gain_range(shared=True) < gain_range(shared=False)


@pytest.mark.slow
def test_a_ttft_goal_lowers_the_rate_and_holds_at_it() -> None:
    market = one_size(small(gbps=(0.2,), budget=6.0))
    free = advise(market).prfaas[0]
    goal = LatencyGoal(ttft_s=1.2, quantile=0.9)
    bound = advise(replace(market, goal=goal)).prfaas[0]
    assert free.solution.ttft is not None and free.solution.ttft.p90_s > 1.2
    assert bound.option.rate_rps < free.option.rate_rps
    assert bound.solution.ttft is not None and bound.solution.ttft.p90_s <= 1.2 * 1.01
    cheapest = advise(replace(with_rate(market, 1.0), goal=goal)).prfaas[0]
    assert cheapest.solution.ttft is not None and cheapest.solution.ttft.p90_s <= 1.2 * 1.01


@pytest.mark.parametrize(
    ("market", "where", "words"),
    [
        (small(budget=0.5), "budget_usd_per_hour", "give at least"),
        (replace(small(), goal=LatencyGoal(1e-4, 0.9)), "slo.ttft_s", "raise it"),
    ],
    ids=["money", "latency"],
)
def test_what_cannot_be_had_is_refused(market: Market, where: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        advise(market)
    assert refused.value.where == where and words in str(refused.value)


def test_the_report_is_plain_data() -> None:
    report = answer_as_dict(advise(small(gbps=(0.2,))))
    assert report["worth_it"] is True and report["prfaas"][0]["gain"] == report["gain"]
    assert report["prfaas"][0]["there"]["accelerator"] == "far"
    assert report["single"][0]["there"] is None
