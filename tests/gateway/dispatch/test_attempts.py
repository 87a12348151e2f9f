from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.gateway import DEFAULTS
from prfaas.errors import ConnectionLost, RequestError
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.dispatch.attempts import LOSSES_S, Attempts, RetryBudget
from prfaas.gateway.dispatch.handoff import AttemptFailed, DecodeNodeFull, record_lost_engine
from prfaas.gateway.request import RequestTrace
from prfaas.gateway.router import Router
from prfaas.testing.clock import FakeClock
from prfaas.tracing.spans import SILENT
from prfaas.types import NotNow
from tests.gateway.fleets import LONG, PD, A, B, C, F, fleet_and_router, member_of, placement

MAX_ATTEMPTS = DEFAULTS.max_attempts
TIMEOUTS = DEFAULTS.timeouts


def attempts(clock: FakeClock) -> tuple[Attempts, Router, RequestTrace]:
    fleet, router = fleet_and_router(clock)
    trace = RequestTrace(clock.now(), attempts=1)
    return Attempts(fleet, RetryBudget(), clock, trace), router, trace


async def test_after_a_failed_remote_prefill_all_remote_nodes_are_avoided() -> None:
    clock = FakeClock()
    subject, router, trace = attempts(clock)
    booking = await router.place(placement(LONG, clock), 1.0)
    subject.record_failure(AttemptFailed("it broke", B), booking)
    assert (subject.avoid, trace.failures) == ({B}, ["it broke"])
    subject.record_failure(AttemptFailed("it broke", F, prefill=True), booking)
    assert subject.avoid == {B, F}


async def test_one_attempt_too_many_fails_with_the_reason() -> None:
    clock = FakeClock()
    subject, router, trace = attempts(clock)
    booking = await router.place(placement(LONG, clock), 1.0)
    trace.attempts = MAX_ATTEMPTS
    with pytest.raises(RequestError, match="it broke") as refused:
        subject.record_failure(AttemptFailed("it broke", A), booking)
    assert refused.value.status == 503 and refused.value.retry_after_s


async def test_a_refused_remainder_costs_no_retry() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    budget, trace = RetryBudget(left=0.0), RequestTrace(clock.now(), attempts=1)
    subject = Attempts(fleet, budget, clock, trace)
    booking = await router.place(placement(LONG, clock), 1.0)
    subject.record_failure(AttemptFailed("evicted", prefill=True, no_alone=True), booking)
    assert (trace.attempts, budget.spent, trace.failures) == (0, 0, ["evicted"])


async def test_a_node_that_leaves_on_purpose_costs_no_retry() -> None:
    """A rolling upgrade refuses many requests, and none of them may fail for it."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    budget, trace = RetryBudget(left=0.0), RequestTrace(clock.now(), attempts=1)
    subject = Attempts(fleet, budget, clock, trace)
    booking = await router.place(placement(LONG, clock), 1.0)
    fleet.record_load(member_of(fleet, F), Load(0, 0), leaving=True, asked_s=0.0, own=0)
    subject.record_failure(AttemptFailed("draining", F, prefill=True), booking)
    assert (subject.avoid, trace.attempts, budget.spent) == ({F}, 0, 0)
    with pytest.raises(RequestError, match="draining"):  # once for each node
        subject.record_failure(AttemptFailed("draining", F, prefill=True), booking)


async def test_an_attempt_that_no_node_has_received_costs_no_retry() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    budget, trace = RetryBudget(left=0.0), RequestTrace(clock.now(), attempts=1)
    subject = Attempts(fleet, budget, clock, trace)
    booking = await router.place(placement(LONG, clock), 1.0)
    subject.record_failure(AttemptFailed("refused", F, prefill=True, unsent=True), booking)
    assert (subject.avoid, trace.attempts, budget.spent) == ({F}, 0, 0)
    subject.record_failure(AttemptFailed("refused", B, unsent=True), booking)
    with pytest.raises(RequestError, match="refused"):
        subject.record_failure(AttemptFailed("refused", B, unsent=True), booking)


def test_a_full_decode_node_means_another_node_and_then_a_backoff() -> None:
    clock = FakeClock()
    subject, _, trace = attempts(clock)
    subject.record_full(DecodeNodeFull(B, PD, NotNow("full", 5.0)))
    assert (subject.avoid, trace.attempts) == ({B}, 0), "nothing was tried"
    trace.attempts = 1
    subject.record_full(DecodeNodeFull(C, PD, NotNow("full", 5.0)))
    assert subject.avoid == frozenset(), "after the backoff all nodes are tried again"
    clock.advance(TIMEOUTS.queue_s - 1)
    subject.record_full(DecodeNodeFull(B, PD, NotNow("full", 5.0)))
    with pytest.raises(RequestError, match="full") as refused:
        subject.record_full(DecodeNodeFull(C, PD, NotNow("full", 5.0)))
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5.0)


@given(st.lists(st.booleans(), max_size=400))
def test_retries_are_a_share_of_the_requests(events: list[bool]) -> None:
    budget = RetryBudget()
    requests = 0
    for is_request in events:
        if is_request:
            requests += 1
            budget.add_request()
        else:
            budget.take(1)
        assert 0 <= budget.left <= budget.limit
        assert budget.spent <= budget.limit + requests * budget.per_request + 1e-9
    assert budget.spent + budget.denied == len(events) - requests


def test_the_attempts_of_one_request_are_bounded() -> None:
    budget = RetryBudget()
    assert [budget.take(n) for n in range(1, MAX_ATTEMPTS + 1)] == [True] * (MAX_ATTEMPTS - 1) + [
        False
    ]


async def test_retries_after_a_silence_take_nothing_from_the_budget() -> None:
    """Of a node at which more requests wait than the budget has retries, none is lost."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    budget = RetryBudget(left=0.0)
    for _ in range(30):
        subject = Attempts(fleet, budget, clock, RequestTrace(clock.now(), attempts=1))
        booking = await router.place(placement(LONG, clock), 1.0)
        subject.record_failure(AttemptFailed("b has fallen silent", B, kind=SILENT), booking)
        assert subject.avoid == {B}
        booking.close(clock.now())
    assert (budget.left, budget.spent, budget.denied) == (0.0, 30, 0)
    assert not budget.take(MAX_ATTEMPTS, known_fault=True), (
        "the attempts of one request are bounded"
    )


async def test_the_death_of_a_node_takes_one_retry_from_the_budget() -> None:
    """Of a node at which more requests were under way than the budget has retries, none is lost."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    budget = RetryBudget(left=1.0)
    booking = await router.place(placement(LONG, clock), 1.0)
    for _ in range(30):
        subject = Attempts(fleet, budget, clock, RequestTrace(clock.now(), attempts=1))
        lost = record_lost_engine(fleet, B, ConnectionLost("closed by the peer"))
        subject.record_failure(AttemptFailed("closed", B, lost=lost), booking)
    assert (budget.left, budget.spent, budget.denied) == (0.0, 30, 0)


async def test_a_node_that_breaks_one_connection_after_the_other_takes_a_retry_for_each() -> None:
    """Its faults differ: it answers polls in between, and gets new requests."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    budget = RetryBudget(left=2.0)
    booking = await router.place(placement(LONG, clock), 1.0)

    def lose() -> None:
        subject = Attempts(fleet, budget, clock, RequestTrace(clock.now(), attempts=1))
        lost = record_lost_engine(fleet, B, ConnectionLost("closed by the peer"))
        subject.record_failure(AttemptFailed("closed", B, lost=lost), booking)
        clock.advance(0.5)
        found = member_of(fleet, B)
        fleet.record_load(found, Load(0, 0), leaving=False, asked_s=clock.now(), own=0)

    lose()
    lose()
    with pytest.raises(RequestError, match="closed"):
        lose()


async def test_a_request_that_loses_a_second_node_waits_before_it_tries_a_third() -> None:
    """The nodes of a cluster that is lost die within a moment, and then refuse connections, which
    costs no attempt."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    subject = Attempts(fleet, RetryBudget(), clock, RequestTrace(clock.now(), attempts=1))
    booking = await router.place(placement(LONG, clock), 1.0)
    waits = []
    for node in (B, C):
        lost = record_lost_engine(fleet, node, ConnectionLost("closed by the peer"))
        subject.record_failure(AttemptFailed("closed", node, lost=lost), booking)
        waits.append(subject.backoff_s)
    assert waits == [0.0, LOSSES_S]


def test_a_quiet_time_saves_up_retries_up_to_the_limit() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.add_request()
    assert sum(budget.take(1) for _ in range(1000)) == budget.limit
