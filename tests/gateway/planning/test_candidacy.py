"""Who plans: never two gateways at once, with rising epochs, and soon another one when one dies."""

from __future__ import annotations

from itertools import combinations

import pytest

from prfaas.contracts.kvd_api import LONGEST_LEASE_S, MOST_EPOCH, ClaimPlanning, PlanningLease
from prfaas.gateway.planning.candidacy import MARGIN_S, RENEW_S, Candidacy, has_majority
from tests.gateway.planning.electorate import Electorate, disturb

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
    candidacy = planner()
    claim, _ = play(candidacy, 0.5, dict.fromkeys(URLS, granted(1)), seen_epoch=MOST_EPOCH)
    assert claim.epoch == 1 and candidacy.plans(0.5)


def test_a_gateway_that_has_ended_claims_no_more() -> None:
    candidacy = planner()
    claim = candidacy.begin_round(0.5, URLS, 0)
    assert candidacy.end() == ClaimPlanning("a", 1, 0.0) and not candidacy.plans(0.5)
    candidacy.receive(URLS[0], claim, 0.5, granted(1), 0.5)
    candidacy.receive(URLS[1], claim, 0.5, granted(1), 0.5)
    assert not candidacy.plans(0.5)
    free = dict.fromkeys(URLS, PlanningLease("a", 1, False, 0.0))
    assert {play(candidacy, 1.0 + n, free)[0].epoch for n in range(10)} == {0}
