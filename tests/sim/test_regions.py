"""Several PD clusters that share PrfaaS clusters: capacity, and the loss of sites and links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.errors import InputError
from prfaas.planner.problem import Path, Problem
from prfaas.scheduler.homes.plans import planned_rps
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import poisson, poisson_at_homes
from prfaas.sim.config import ClusterFault, Fault, LinkFault, NodeFault, RateChange, SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.sim.saturation import saturated_rps
from prfaas.types import ClusterId, NodeId
from tests.planner.builders import case_study
from tests.scheduler.homes.networks import EAST, NETWORK, NORTH, ROUND_TRIPS, WEST
from tests.sim.random_regions import drawn_case

BOTH = pytest.mark.parametrize("policy", ["paper", "adaptive"])
LOAD_RPS = 0.5 * planned_rps(NETWORK, "paper")
ARRIVALS = poisson_at_homes(NETWORK, LOAD_RPS, 240, seed=2)
HALF_S, END_S = float(ARRIVALS.at_s[120]), float(ARRIVALS.at_s[180])


def config(policy: str, *faults: Fault, elsewhere: bool = True, replans: bool = False) -> SimConfig:
    rules = SchedulerSection(policy=policy, decode_elsewhere=elsewhere)  # type: ignore[arg-type]
    return SimConfig(scheduler=rules, faults=faults, round_trips=ROUND_TRIPS, replans=replans)


def served(result: Result) -> bool:
    return not np.isnan(result.requests.first_token_s).any()


def decoded_at(result: Result, cluster: str) -> int:
    number = [one.name for one in result.clusters].index(cluster)
    return int((result.requests.decode_cluster == number).sum())


def test_requests_arrive_by_the_shares_with_their_own_lengths() -> None:
    assert ARRIVALS.homes is not None
    assert np.bincount(ARRIVALS.homes)[0] == pytest.approx(144, abs=30)
    longer = replace(
        NETWORK.homes[1].problem.workload, new=NETWORK.homes[1].problem.workload.new * 3
    )
    homes = (
        NETWORK.homes[0],
        replace(NETWORK.homes[1], problem=replace(NETWORK.homes[1].problem, workload=longer)),
    )
    made = poisson_at_homes(replace(NETWORK, homes=homes), 1.0, 2000, seed=0)
    assert made.homes is not None
    means = [made.prompt_tokens[made.homes == number].mean() for number in (0, 1)]
    assert means[1] == pytest.approx(3 * means[0], rel=0.15)


@BOTH
def test_every_request_decodes_at_its_home_while_all_is_well(policy: str) -> None:
    result = simulate(NETWORK, ARRIVALS, config(policy))
    rows = result.requests
    assert served(result) and result.stable
    assert (rows.decode_cluster == rows.home).all()
    assert ((rows.prefill_cluster >= 2) == rows.offloaded).all()
    bits = sum(values.sum() for values in result.series.egress_bits.values())
    tokens = rows.prompt_tokens[rows.offloaded].sum()
    assert bits == pytest.approx(8 * (1000 * tokens + 50_000 * rows.offloaded.sum()), rel=1e-6)


@BOTH
def test_a_lost_pd_site_costs_no_request_that_another_may_serve(policy: str) -> None:
    fault = ClusterFault(EAST, HALF_S, END_S)
    result = simulate(NETWORK, ARRIVALS, config(policy, fault))
    rows = result.requests
    assert served(result)
    away = (rows.home == 0) & (rows.decode_cluster == 1)
    assert away.any()
    # Until the site returns, and no longer than its last request needs.
    assert rows.arrival_s[away].max() <= END_S
    later = (rows.home == 0) & (rows.arrival_s > END_S)
    assert (rows.decode_cluster[later] == 0).all()


def test_requests_wait_for_a_lost_site_where_no_other_may_decode_them() -> None:
    fault = ClusterFault(EAST, HALF_S, END_S)
    result = simulate(NETWORK, ARRIVALS, config("adaptive", fault, elsewhere=False))
    assert served(result)
    assert (result.requests.decode_cluster == result.requests.home).all()


def test_the_requests_of_a_lost_site_do_not_stand_before_those_of_another() -> None:
    """Both sites are lost; only `west` returns, and nothing may decode elsewhere."""
    lost = (ClusterFault(EAST, HALF_S / 2, 10 * END_S), ClusterFault(WEST, HALF_S, END_S))
    result = simulate(NETWORK, ARRIVALS, config("paper", *lost, elsewhere=False))
    rows = result.requests
    west = rows.home == 1
    assert served(result)
    assert rows.first_token_s[west].max() < 3 * END_S


@pytest.mark.slow
@BOTH
def test_a_site_that_is_lost_for_good_does_not_harm_the_others(policy: str) -> None:
    for_ever = ClusterFault(EAST, HALF_S)
    result = simulate(NETWORK, ARRIVALS, config(policy, for_ever, elsewhere=False))
    rows = result.requests
    assert not np.isnan(rows.first_token_s[rows.home == 1]).any()
    assert np.isnan(rows.first_token_s[(rows.home == 0) & (rows.arrival_s > HALF_S)]).all()


@pytest.mark.parametrize(("policy", "replans"), [("paper", True), ("adaptive", False)])
def test_a_lost_prfaas_site_costs_no_request(policy: str, replans: bool) -> None:
    fault = ClusterFault(NORTH, HALF_S)
    result = simulate(NETWORK, ARRIVALS, config(policy, fault, replans=replans))
    rows = result.requests
    assert served(result)
    assert not (rows.prefill_cluster[rows.arrival_s > HALF_S] == 2).any()
    assert rows.retries.max() == 1  # no request starts again on a node that is lost as well


@BOTH
def test_a_lost_link_costs_no_request(policy: str) -> None:
    result = simulate(NETWORK, ARRIVALS, config(policy, LinkFault((NORTH, EAST), HALF_S, END_S)))
    rows = result.requests
    assert served(result)
    over_it = (rows.prefill_cluster == 2) & (rows.decode_cluster == 0)
    lost = (rows.arrival_s > HALF_S) & (rows.arrival_s < END_S - 5.0)
    assert not over_it[lost].any()
    assert over_it[rows.arrival_s < HALF_S].any() and over_it[rows.arrival_s > END_S].any()


def test_a_site_returns_when_the_last_of_its_faults_has_ended() -> None:
    """A node of the site has a fault of its own, which ends before that of the site."""
    site = ClusterFault(NORTH, HALF_S / 3, END_S)
    node = NodeFault(NodeId("north-0"), HALF_S / 4, HALF_S / 2)
    rows = simulate(NETWORK, ARRIVALS, config("paper", node, site)).requests
    there = rows.prefill_cluster == 2
    assert not there[(rows.arrival_s > HALF_S / 3) & (rows.arrival_s < END_S - 5.0)].any()
    assert there[rows.arrival_s > END_S].any()


def test_a_lost_link_returns_with_the_rate_that_it_has_by_then() -> None:
    """Its rate changes while it is lost."""
    link = (NORTH, EAST)
    changed = replace(
        config("paper", LinkFault(link, HALF_S, END_S)),
        links={link: (RateChange((HALF_S + END_S) / 2, 0.02),)},
    )
    result = simulate(NETWORK, ARRIVALS, changed)
    carried = result.series.egress_bits[link] / result.series.bin_s
    assert carried[int(HALF_S) + 1 : int(END_S)].sum() == 0.0
    assert 0.0 < carried[int(END_S) + 1 :].max() <= 0.02 * 1e9 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (ClusterFault(ClusterId("nord"), 1.0), "no 'nord'; name one of: east, north, south, west"),
        (LinkFault((EAST, NORTH), 1.0), "no 'east -> north'"),
        (NodeFault(NodeId("north-2"), 1.0), "no 'north-2'"),
        (ClusterFault(NORTH, 5.0, 5.0), "a fault from 5 s until 5 s"),
    ],
)
def test_an_impossible_fault_is_named(fault: Fault, says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        simulate(NETWORK, ARRIVALS, config("paper", LinkFault((NORTH, EAST), 1.0), fault))
    assert raised.value.where == "faults.1"


@pytest.mark.slow
@BOTH
def test_a_link_that_is_lost_for_good_costs_no_request(policy: str) -> None:
    result = simulate(NETWORK, ARRIVALS, config(policy, LinkFault((NORTH, EAST), HALF_S)))
    rows = result.requests
    assert served(result)
    over_it = (rows.prefill_cluster == 2) & (rows.decode_cluster == 0)
    assert not over_it[rows.arrival_s > HALF_S].any()


def test_a_full_pd_site_sends_requests_elsewhere() -> None:
    """Nine in ten requests arrive at `east`, which has too few decode slots for them."""
    small = NETWORK.with_homes(
        lambda p: replace(p, local=replace(p.local, decode=replace(p.local.decode, bs_max=3)))
    )
    crowd = poisson_at_homes(small, 1.3 * planned_rps(small, "paper"), 300, seed=4)
    assert crowd.homes is not None
    crowd = replace(crowd, homes=np.where(np.arange(300) % 10 == 0, 1, 0))
    with_, without = (
        simulate(small, crowd, config("adaptive", elsewhere=allowed)) for allowed in (True, False)
    )
    assert decoded_at(with_, WEST) > 60 > decoded_at(without, WEST)
    assert np.nanmean(with_.requests.ttft_s) < np.nanmean(without.requests.ttft_s)


# Plans are reached -------------------------------------------------------------------------------


def unequal_links() -> Problem:
    """The case study with its PrfaaS cluster as two halves, one behind a slow link."""
    given = case_study()
    (remote,) = given.remotes
    half = remote.pool.instances // 2
    wide = replace(remote.pool, cluster="wide", instances=half)
    narrow = replace(remote.pool, cluster="narrow", instances=half)
    return replace(
        given,
        remotes=(
            replace(remote, pool=wide, path=Path(100e9, 0.02)),
            replace(remote, pool=narrow, path=Path(4e9, 0.06)),
        ),
    )


@pytest.mark.parametrize("policy", ["paper", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_unequal_links_are_used_as_planned(policy: str) -> None:
    given = unequal_links()
    planned = find_optimum(given)
    arrivals = poisson(given.workload, 0.95 * planned.capacity_rps, 2500, seed=0)
    result = simulate(given, arrivals, config(policy))
    assert result.stable, result.bottleneck
    if policy == "paper":
        rows = result.requests
        sent = rows.prompt_tokens * rows.offloaded
        share = sent[rows.prefill_cluster == 1].sum() / sent.sum()
        assert share == pytest.approx(planned.shares[0], abs=0.01)


@pytest.mark.parametrize("policy", [pytest.param("paper", marks=pytest.mark.grid), "adaptive"])
@pytest.mark.parametrize(
    "seed", [pytest.param(2, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.grid)]
)
def test_random_deployments_are_served_at_the_planned_rate(seed: int, policy: str) -> None:
    """Of 4 x 2 and of 4 x 3 clusters."""
    network, arrivals = drawn_case(1500.0, seed)
    found = saturated_rps(network, arrivals, config(policy))
    assert found == pytest.approx(planned_rps(network, "paper"), rel=0.03)
