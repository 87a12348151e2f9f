from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.scheduler.board import Board
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.short_term import route
from prfaas.scheduler.state import ShortTermState
from prfaas.types import ClusterId, LinkStats
from tests.scheduler.homes.networks import EAST, LONG, NORTH, PLANS, SOUTH, WEST, board

PAPER = ShortTermState(SchedulerSection(policy="paper"))
REMOTE = ShortTermState(SchedulerSection(policy="remote"))


def send(
    seen: Board,
    plan: Plan,
    tokens: int = LONG,
    home: ClusterId = EAST,
    state: ShortTermState = PAPER,
) -> Route:
    taken = route(Request(1, tokens), seen.view(0.0, {}, {}, home), plan, state)
    assert isinstance(taken, Route)
    seen.record_dispatch(taken, 0.0, 0.0)
    return taken


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1), (0.995, 0.005)])
@pytest.mark.parametrize("state", [PAPER, REMOTE], ids=["paper", "remote"])
def test_each_cluster_gets_its_share_of_the_tokens(
    state: ShortTermState, shares: tuple[float, float]
) -> None:
    plan, seen = replace(PLANS[EAST], shares=shares), board()
    sent = {NORTH: 0, SOUTH: 0}
    for count in range(400):
        tokens = LONG - 7 * (count % 50)
        sent[send(seen, plan, tokens, state=state).cluster] += tokens
        for cluster, share in zip((NORTH, SOUTH), shares, strict=True):
            assert abs(sent[cluster] - share * sum(sent.values())) <= LONG


def test_a_cluster_that_returns_has_nothing_to_catch_up() -> None:
    plan, seen = replace(PLANS[EAST], shares=(0.5, 0.5)), board()
    seen.record_link_report((SOUTH, EAST), LinkStats("east", 1.0, 0, 0.0, 0, 0, 0.0))
    assert {send(seen, plan).cluster for _ in range(50)} == {NORTH}
    seen.record_link_report((SOUTH, EAST), LinkStats("east", 2.0, 1, 0.0, 0, 0, 0.0))
    after = [send(seen, plan).cluster for _ in range(10)]
    assert after.count(SOUTH) == 5


def test_the_shares_of_one_home_do_not_count_for_another() -> None:
    seen = board()
    for _ in range(5):
        send(seen, replace(PLANS[EAST], shares=(1.0, 0.0)))
    both = replace(PLANS[WEST], shares=(0.5, 0.5))
    assert {send(seen, both, home=WEST).cluster for _ in range(2)} == {NORTH, SOUTH}


def test_where_the_plan_sends_nothing_the_cluster_that_ends_first_is_taken() -> None:
    seen = board()
    taken = [send(seen, replace(PLANS[EAST], shares=(0.0, 0.0))) for _ in range(4)]
    assert [way.credits for way in taken] == [()] * 4
    assert len({way.prefill for way in taken}) == 4  # every node of both clusters
