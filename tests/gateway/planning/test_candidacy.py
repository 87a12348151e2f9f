"""Who plans: never two gateways at once, with rising epochs, and soon another one when one dies."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.kvd_api import LONGEST_LEASE_S, MOST_EPOCH, ClaimPlanning, PlanningLease
from prfaas.gateway.planning.candidacy import (
    MARGIN_S,
    MOST_AHEAD,
    RENEW_S,
    WIN_BACK_S,
    Candidacy,
    has_majority,
    majority_epoch,
)
from prfaas.kvd.planning_lease import Promise
from tests.gateway.planning.electorate import Electorate, Lie, disturb

FEW_ROUNDS_S = 8 * RENEW_S
SETTLED_S = 30.0  # after faults: the longest lease, the longest wait before a claim, and ties
URLS = ("http://a", "http://b", "http://c")


@pytest.mark.parametrize("kvds", [1, 2, 3, 4, 5])
def test_two_majorities_have_a_kvd_in_common(kvds: int) -> None:
    urls = [f"http://{n}" for n in range(kvds)]
    sets = [set(some) for size in range(kvds + 1) for some in combinations(urls, size)]
    enough = [some for some in sets if has_majority(some, urls)]
    assert all(one & other for one in enough for other in enough)
    # One of each set and its rest has a majority: planning never depends on all kvds.
    assert all(has_majority(some, urls) != has_majority(set(urls) - some, urls) for some in sets)


def test_kvds_of_no_list_do_not_count() -> None:
    assert not has_majority([], [])
    assert not has_majority(["http://x", "http://y", "http://a"], URLS)
    assert has_majority(["http://x", "http://a", "http://b"], URLS)


def test_more_than_half_of_the_stated_kvds_are_needed_where_none_is_listed() -> None:
    """Whichever kvds a gateway knows: two gateways that know different ones never both plan."""
    stated = 5
    urls = [f"http://{n}" for n in range(stated)]
    known = [set(some) for size in range(6) for some in combinations(urls, size)]
    enough = [some for some in known if has_majority(some, some, stated)]
    assert enough and all(a & b for a in enough for b in enough)
    assert not has_majority(urls[:2], urls[:4], 4)  # exactly half
    assert not has_majority(urls[:3], urls, 2 * stated)
    assert not has_majority(urls[:2], urls, 2)  # more have come than are stated


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("restarts", [False, True])
def test_never_two_gateways_plan_at_once(seed: int, restarts: bool) -> None:
    """Epochs rise without reports between gateways as long as no kvd forgets its promise, and with
    reports also then."""
    gateways, kvds = 2 + seed % 3, 1 + seed % 5
    electorate = Electorate(f"{seed}", gateways, kvds, with_reports=restarts)
    disturb(electorate, 60.0, restarts=restarts)
    electorate.run(electorate.now_s + SETTLED_S)
    (planner,) = electorate.planning
    for _ in range(gateways - 1):
        electorate.kill(planner)
        electorate.run(electorate.now_s + LONGEST_LEASE_S + FEW_ROUNDS_S)
        (planner,) = electorate.planning


LIES: dict[str, Lie] = {
    "the last epoch": lambda claim, lease: PlanningLease("x", MOST_EPOCH, False, 0.0),
    "almost the last": lambda claim, lease: PlanningLease("x", MOST_EPOCH - 2, False, 60.0),
    "the next one": lambda claim, lease: PlanningLease("x", claim.epoch + 1, False, 60.0),
    "the same one": lambda claim, lease: PlanningLease("x", claim.epoch, False, 0.0),
    "none": lambda claim, lease: PlanningLease("", 0, False, 0.0),
    "a wrong grant": lambda claim, lease: PlanningLease("x", MOST_EPOCH, True, 60.0),
    "far beside a grant": lambda claim, lease: PlanningLease(
        lease.gateway, lease.epoch + MOST_AHEAD, lease.granted, lease.left_s
    ),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_kvd_that_lies_about_epochs_ends_no_planning(lie: str, seed: int, restarts: bool) -> None:
    gateways = 2 + seed % 2
    electorate = Electorate(f"{lie} {seed}", gateways, 3 + 2 * (seed % 2), with_reports=True)
    electorate.lies[electorate.random.choice(electorate.urls)] = LIES[lie]
    # What a lie has added counts no more when a majority and the candidate have been restarted.
    electorate.epochs_rise = not restarts
    disturb(electorate, 60.0, restarts=restarts)
    electorate.run(electorate.now_s + SETTLED_S)
    (planner,) = electorate.planning
    since_s = electorate.now_s
    electorate.run(since_s + 60.0)
    assert electorate.planning == [planner], "it goes on"
    renewed = [at_s for at_s, _, _ in electorate.planners if at_s > since_s]
    assert len(renewed) <= 60.0 / WIN_BACK_S, "a lie costs a claim from time to time"
    assert planner.candidacy.epoch < 1000 * MOST_AHEAD
    for _ in range(gateways - 1):
        electorate.kill(planner)
        electorate.run(electorate.now_s + LONGEST_LEASE_S + FEW_ROUNDS_S)
        (planner,) = electorate.planning
    electorate.start_gateway()  # that has heard nothing yet
    electorate.kill(planner)
    electorate.run(electorate.now_s + LONGEST_LEASE_S + FEW_ROUNDS_S)
    assert len(electorate.planning) == 1


def test_a_minority_that_is_far_ahead_is_reached_in_several_claims() -> None:
    """Two of three kvds and all gateways were restarted."""
    electorate = Electorate("ahead", 2, 3, with_reports=True)
    ahead = 3 * MOST_AHEAD
    electorate.kvds[electorate.urls[2]].promise = Promise("gone", ahead, 0.0)
    electorate.run(LONGEST_LEASE_S + FEW_ROUNDS_S + 5 * WIN_BACK_S)
    (planner,) = electorate.planning
    assert planner.candidacy.epoch > ahead
    instance = planner.candidacy.instance
    assert {kvd.promise.gateway for kvd in electorate.kvds.values()} == {instance}


@pytest.mark.parametrize(
    ("epochs", "found"),
    [
        ((), 0),
        ((7,), 0),
        ((7, 5), 5),
        ((MOST_EPOCH, 5), 5),
        ((MOST_EPOCH, 5, 4), 5),
        ((0, 5, 4), 4),
        ((0, 0, 4), 0),
    ],
)
def test_what_a_majority_has_promised(epochs: tuple[int, ...], found: int) -> None:
    assert majority_epoch(dict(zip(URLS, epochs, strict=False)), URLS) == found


@given(st.lists(st.integers(0, MOST_EPOCH), min_size=1, max_size=7), st.integers(0, 7))
def test_some_majority_is_at_that_epoch_and_none_beyond(epochs: list[int], stated: int) -> None:
    heard = {f"http://{number}": epoch for number, epoch in enumerate(epochs)}
    found = majority_epoch(heard, heard, stated)
    reached = {url for url, epoch in heard.items() if epoch >= found}
    beyond = {url for url, epoch in heard.items() if epoch > found}
    assert found == 0 or has_majority(reached, heard, stated)
    assert not has_majority(beyond, heard, stated)


@pytest.mark.parametrize("seed", range(20))
def test_a_calm_deployment_keeps_its_planner_and_uses_every_kvd(seed: int) -> None:
    electorate = Electorate(f"calm {seed}", 3, 3, with_reports=False)
    electorate.run(LONGEST_LEASE_S + FEW_ROUNDS_S)
    (planner,) = electorate.planning
    electorate.run(electorate.now_s + FEW_ROUNDS_S)
    before = list(electorate.planners)
    electorate.run(60.0)
    assert electorate.planners == before
    instance = planner.candidacy.instance
    assert {kvd.promise.gateway for kvd in electorate.kvds.values()} == {instance}


@pytest.mark.parametrize("seed", range(20))
def test_after_a_clean_stop_another_plans_within_a_few_rounds(seed: int) -> None:
    electorate = Electorate(f"stop {seed}", 2, 3, with_reports=False)
    electorate.run(LONGEST_LEASE_S + FEW_ROUNDS_S)
    (planner,) = electorate.planning
    electorate.stop_cleanly(planner)
    electorate.run(electorate.now_s + 3 * RENEW_S)
    assert len(electorate.planning) == 1


def planner() -> Candidacy:
    """`a`, which plans with epoch 1 since 0 s."""
    candidacy = Candidacy("a")
    free = PlanningLease("", 0, False, 0.0)
    assert play(candidacy, -RENEW_S, dict.fromkeys(URLS, free))[0] == ClaimPlanning("a", 0, 0.0)
    claim, given_up = play(candidacy, 0.0, dict.fromkeys(URLS, granted(1)))
    assert claim == ClaimPlanning("a", 1, LONGEST_LEASE_S) and given_up is None
    assert candidacy.plans(0.0) and candidacy.epoch == 1
    return candidacy


def granted(epoch: int) -> PlanningLease:
    return PlanningLease("a", epoch, True, LONGEST_LEASE_S)


def play(
    candidacy: Candidacy, now_s: float, answers: dict[str, PlanningLease], seen_epoch: int = 0
) -> tuple[ClaimPlanning, ClaimPlanning | None]:
    """A round in which every message takes no time."""
    claim = candidacy.begin_round(now_s, URLS, seen_epoch)
    for url, lease in answers.items():
        candidacy.receive(url, claim, now_s, lease, now_s)
    return claim, candidacy.end_round(now_s)


def test_a_lease_is_counted_from_when_it_was_asked_for() -> None:
    candidacy = planner()
    claim = candidacy.begin_round(1.0, URLS, 0)
    for url in URLS[:2]:
        candidacy.receive(url, claim, 1.0, granted(1), 2.0)
    end_s = 1.0 + LONGEST_LEASE_S - MARGIN_S
    assert candidacy.plans(end_s - 0.001) and not candidacy.plans(end_s)


def test_an_answer_that_comes_after_the_lease_has_ended_does_not_prolong_it() -> None:
    candidacy = planner()
    claim = candidacy.begin_round(1.0, URLS, 0)
    late_s = LONGEST_LEASE_S
    for url in URLS:
        candidacy.receive(url, claim, 1.0, granted(1), late_s)
    assert not candidacy.plans(late_s)
    assert candidacy.end_round(late_s) == ClaimPlanning("a", 1, 0.0)
    assert candidacy.begin_round(late_s, URLS, 0).epoch == 0
    candidacy.end_round(late_s)
    assert candidacy.epoch == 1 and not candidacy.plans(late_s)


def test_a_claim_that_fails_is_given_up_and_the_next_epoch_is_higher() -> None:
    candidacy = Candidacy("a")
    free = dict.fromkeys(URLS, PlanningLease("b", 4, False, 0.0))
    play(candidacy, 0.0, free)
    claim, given_up = play(candidacy, RENEW_S, {URLS[0]: granted(5)})
    assert claim == ClaimPlanning("a", 5, LONGEST_LEASE_S)
    assert given_up == ClaimPlanning("a", 5, 0.0) and not candidacy.plans(RENEW_S)
    play(candidacy, 2 * RENEW_S, free, seen_epoch=8)
    claim, _ = play(candidacy, 60.0, dict.fromkeys(URLS, granted(9)))
    assert claim.epoch == candidacy.epoch == 9 and candidacy.plans(60.0)


def test_no_claim_is_made_while_another_gateway_has_the_lease() -> None:
    candidacy = Candidacy("a")
    for number in range(10):
        held = dict.fromkeys(URLS[:2], PlanningLease("b", 4, False, 1.0))
        claim, _ = play(candidacy, number * RENEW_S, {**held, URLS[2]: granted(0)})
        assert claim == ClaimPlanning("a", 0, 0.0)
        assert not candidacy.plans(number * RENEW_S) and candidacy.highest_epoch == 4


@pytest.mark.parametrize("other_epoch", [1, 7])
def test_a_kvd_that_has_promised_as_high_an_epoch_to_another_is_won_back(other_epoch: int) -> None:
    candidacy = planner()
    other = PlanningLease("b", other_epoch, False, 0.0)
    play(candidacy, 0.5, {URLS[0]: granted(1), URLS[1]: granted(1), URLS[2]: other})
    claim, _ = play(candidacy, 1.0, {URLS[0]: granted(other_epoch + 1)})
    assert claim == ClaimPlanning("a", other_epoch + 1, LONGEST_LEASE_S)
    assert candidacy.plans(1.0) and candidacy.epoch == 1  # the later one has no majority yet
    claim, _ = play(candidacy, 1.5, dict.fromkeys(URLS, granted(other_epoch + 1)))
    assert claim.epoch == candidacy.epoch == other_epoch + 1 and candidacy.plans(1.5)
    assert play(candidacy, 2.0, {})[0] == claim  # from now on it renews


def test_the_last_epoch_is_not_exceeded() -> None:
    candidacy = Candidacy("a")
    for number in range(10):
        last = dict.fromkeys(URLS, PlanningLease("b", MOST_EPOCH, False, 0.0))
        claim, _ = play(candidacy, number * RENEW_S, last)
        assert claim == ClaimPlanning("a", 0, 0.0)


def test_hearsay_counts_little_and_is_not_passed_on() -> None:
    candidacy = planner()
    claim, _ = play(candidacy, 0.5, dict.fromkeys(URLS, granted(1)), seen_epoch=MOST_EPOCH)
    assert claim.epoch == candidacy.highest_epoch == 2 + MOST_AHEAD and candidacy.plans(0.5)
    assert candidacy.majority_epoch == 1
    for number in range(9):
        now_s = 0.5 + number * RENEW_S
        assert now_s < 0.5 + WIN_BACK_S
        won = dict.fromkeys(URLS, granted(claim.epoch))
        assert play(candidacy, now_s, won, seen_epoch=MOST_EPOCH)[0] == claim
    assert candidacy.plans(now_s) and candidacy.majority_epoch == claim.epoch
    assert candidacy.first_epoch == 1, "its planning has not lapsed"


def test_a_gateway_that_has_ended_claims_no_more() -> None:
    candidacy = planner()
    claim = candidacy.begin_round(0.5, URLS, 0)
    assert candidacy.end() == ClaimPlanning("a", 1, 0.0) and not candidacy.plans(0.5)
    candidacy.receive(URLS[0], claim, 0.5, granted(1), 0.5)
    candidacy.receive(URLS[1], claim, 0.5, granted(1), 0.5)
    assert not candidacy.plans(0.5)
    free = dict.fromkeys(URLS, PlanningLease("a", 1, False, 0.0))
    assert {play(candidacy, 1.0 + n, free)[0].epoch for n in range(10)} == {0}
