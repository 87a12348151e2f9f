from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.gateway import DEFAULTS
from prfaas.errors import ConnectionLost, RequestError
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.dispatch.attempts import LOSSES_S, Attempts, RetryBudget
from prfaas.gateway.dispatch.handoff import AttemptFailed, DecodeNodeFull, record_lost_engine
from prfaas.gateway.dispatch.kept_out import KEPT_OUT_S, KeptOut
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.request import RequestTrace
from prfaas.gateway.router import Router
from prfaas.tracing.spans import SILENT
from prfaas.types import NodeId, NotNow
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import gateway_request, prompt
from tests.gateway.fleets import (
    LONG,
    PD,
    A,
    B,
    C,
    F,
    fall_silent,
    fleet_and_router,
    member_of,
    placement,
)
from tests.gateway.reports import report

MAX_ATTEMPTS = DEFAULTS.max_attempts
TIMEOUTS = DEFAULTS.timeouts


def attempts(clock: FakeClock) -> tuple[Attempts, Router, RequestTrace]:
    fleet, router = fleet_and_router(clock)
    trace = RequestTrace(clock.now(), attempts=1)
    return attempts_at(fleet, RetryBudget(), clock, trace), router, trace


def attempts_at(
    fleet: Fleet, budget: RetryBudget, clock: FakeClock, trace: RequestTrace
) -> Attempts:
    """Of a request that no other test case repeats."""
    request = gateway_request(prompt(LONG))
    return Attempts(request, fleet, budget, KeptOut(clock), clock, trace)


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
    subject = attempts_at(fleet, budget, clock, trace)
    booking = await router.place(placement(LONG, clock), 1.0)
    subject.record_failure(AttemptFailed("evicted", prefill=True, no_alone=True), booking)
    assert (trace.attempts, budget.spent, trace.failures) == (0, 0, ["evicted"])


async def test_a_node_that_leaves_on_purpose_costs_no_retry() -> None:
    """A rolling upgrade refuses many requests, and none of them may fail for it."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    budget, trace = RetryBudget(left=0.0), RequestTrace(clock.now(), attempts=1)
    subject = attempts_at(fleet, budget, clock, trace)
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
    subject = attempts_at(fleet, budget, clock, trace)
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
        subject = attempts_at(fleet, budget, clock, RequestTrace(clock.now(), attempts=1))
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
        subject = attempts_at(fleet, budget, clock, RequestTrace(clock.now(), attempts=1))
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
        subject = attempts_at(fleet, budget, clock, RequestTrace(clock.now(), attempts=1))
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
    subject = attempts_at(fleet, RetryBudget(), clock, RequestTrace(clock.now(), attempts=1))
    booking = await router.place(placement(LONG, clock), 1.0)
    waits = []
    for node in (B, C):
        lost = record_lost_engine(fleet, node, ConnectionLost("closed by the peer"))
        subject.record_failure(AttemptFailed("closed", node, lost=lost), booking)
        waits.append(subject.backoff_s)
    assert waits == [0.0, LOSSES_S]


@dataclass
class Losing:
    """A request that loses engines, and what is remembered of it."""

    clock: FakeClock
    fleet: Fleet
    booking: Booking
    budget: RetryBudget = field(default_factory=RetryBudget)
    trace: RequestTrace = field(default_factory=lambda: RequestTrace(0.0))

    def __post_init__(self) -> None:
        self.kept_out = KeptOut(self.clock)
        self.subject = self.again()

    def again(self, seed: int = 0) -> Attempts:
        """The same request once more, or another one."""
        request = gateway_request(prompt(LONG, seed))
        trace, kept_out = self.trace, self.kept_out
        return Attempts(request, self.fleet, self.budget, kept_out, self.clock, trace)

    def lose(self, node: NodeId) -> None:
        """Its connection breaks while it has the request."""
        lost = record_lost_engine(self.fleet, node, ConnectionLost("closed by the peer"))
        failure = AttemptFailed(f"{node} closed", node, lost=lost, engine=node)
        self.trace.attempts += 1
        self.subject.record_failure(failure, self.booking)

    def lose_in_silence(self, node: NodeId) -> None:
        failure = AttemptFailed(f"{node} has fallen silent", node, engine=node, kind=SILENT)
        self.trace.attempts += 1
        self.subject.record_failure(failure, self.booking)

    def pass_time(self, *nodes: NodeId, instance: str = "first") -> None:
        """So long that nothing stays undecided; only the kvds of these nodes answer."""
        self.clock.advance(2 * LOSSES_S + 2 * self.fleet.timeouts.kvd_poll_s)
        for node in nodes:
            answer = report(node, instance=instance)
            self.fleet.record_report(member_of(self.fleet, node), answer)

    async def is_refused(self) -> RequestError:
        with pytest.raises(RequestError) as refused:
            await self.subject.back_off()
        assert (refused.value.status, refused.value.code) == (503, "nodes_lost")
        return refused.value


async def losing() -> Losing:
    clock = FakeClock(100.0)
    fleet, router = fleet_and_router(clock)
    return Losing(clock, fleet, await router.place(placement(LONG, clock), 1.0))


async def test_a_request_that_loses_two_engines_alone_is_refused_and_kept_out() -> None:
    case = await losing()
    await case.again().begin()
    case.lose(F)
    await case.subject.back_off()
    case.lose(B)
    case.pass_time(F, B)
    refused = await case.is_refused()
    assert "f and b were lost while they had the request" in refused.message
    with pytest.raises(RequestError, match="has cost two nodes") as again:
        await case.again().begin()
    assert (again.value.code, again.value.retry_after_s) == ("nodes_lost", KEPT_OUT_S)
    await case.again(seed=1).begin()
    assert case.budget.nodes_lost == 2
    case.clock.advance(KEPT_OUT_S)
    await case.again().begin()


async def test_the_same_request_beside_it_stops_at_its_next_loss() -> None:
    case = await losing()
    for node in (F, B):
        case.lose(node)
    case.pass_time(F, B)
    await case.is_refused()
    case.subject, case.trace.attempts = case.again(), 0
    case.lose(C)
    await case.is_refused()


@pytest.mark.parametrize(
    ("answering", "instance"),
    [((F,), "first"), ((B,), "first"), ((), "first"), ((F, B), "another")],
)
async def test_an_engine_that_is_lost_with_its_host_is_not_the_fault_of_the_request(
    answering: tuple[NodeId, ...], instance: str
) -> None:
    """A host that has started again answers, too, but as another process."""
    case = await losing()
    case.lose(F)
    case.lose(B)
    case.pass_time(*answering, instance=instance)
    await case.subject.back_off()
    await case.again().begin()
    assert case.budget.nodes_lost == 0


async def test_a_kvd_that_dies_a_moment_after_its_engine_has_not_gone_on_answering() -> None:
    case = await losing()
    case.lose(F)
    case.pass_time(F)
    case.lose(B)
    case.clock.advance(LOSSES_S)
    case.fleet.record_report(member_of(case.fleet, B), report(B))
    case.pass_time()
    await case.subject.back_off()


async def test_engines_that_fall_silent_alone_count_as_lost() -> None:
    case = await losing()
    for node in (F, B):
        case.fleet.record_report(member_of(case.fleet, node), report(node))
        fall_silent(case.fleet, case.clock, node)
        case.fleet.record_report(member_of(case.fleet, node), report(node))
        case.lose_in_silence(node)
    await case.is_refused()


async def test_hosts_that_fall_silent_do_not_count() -> None:
    """They may go on at any time; the kvds answer then."""
    case = await losing()
    for node in (F, B):
        fall_silent(case.fleet, case.clock, node)
        case.lose_in_silence(node)
    case.pass_time(F, B)
    await case.subject.back_off()
    assert case.budget.nodes_lost == 0


async def test_an_engine_that_did_not_have_the_request_does_not_count() -> None:
    case = await losing()
    case.lose(F)
    case.pass_time(F)
    case.trace.attempts += 1
    lost = record_lost_engine(case.fleet, B, ConnectionLost("closed by the peer"))
    case.subject.record_failure(AttemptFailed("its kvd", B, lost=lost), case.booking)
    case.pass_time(B)
    await case.subject.back_off()
    case.lose(C)
    case.pass_time(C)
    await case.is_refused()


@pytest.mark.parametrize("first_was_alone", [True, False])
async def test_the_second_retry_after_a_lost_engine_counts(first_was_alone: bool) -> None:
    """The first one is free where the fault is known, so that no request is lost with its node."""
    case = await losing()
    case.budget.left = 0.0
    for node in (F, B):
        record_lost_engine(case.fleet, node, ConnectionLost("closed by the peer"))
    case.lose(F)
    await case.subject.back_off()
    case.pass_time(*((F,) if first_was_alone else ()))
    case.lose(B)
    case.pass_time()
    if first_was_alone:
        with pytest.raises(RequestError, match="failed after 2 attempts"):
            await case.subject.back_off()
    else:
        await case.subject.back_off()


async def test_a_request_whose_fields_are_checked_late_is_refused_at_the_second_engine() -> None:
    """It may be what keeps them busy, or the victim of what does: so it may come again."""
    case = await losing()
    late = [AttemptFailed(f"{node} is late", node, late=True) for node in (F, B)]
    case.subject.record_failure(late[0], case.booking)
    await case.subject.back_off()
    with pytest.raises(RequestError, match="is late") as refused:
        case.subject.record_failure(late[1], case.booking)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    await case.again().begin()  # it is not kept out


def test_one_tenant_cannot_take_the_retries_of_others() -> None:
    budget = RetryBudget()
    hostile = 0
    for _ in range(1000):
        budget.add_request("a")
        hostile += sum(budget.take(1, tenant="a") for _ in range(3))
    assert hostile <= 1000 * budget.per_request + budget.limit / 2
    assert all(budget.take(1, tenant="b") for _ in range(int(budget.limit / 2)))
    assert not budget.take(1, tenant="b"), "the retries of both are a share of their requests"


def test_a_tenants_part_of_the_retries_comes_back_with_its_requests() -> None:
    budget = RetryBudget()
    while budget.take(1, tenant="a"):
        pass
    assert budget.left == budget.limit / 2
    for _ in range(1000):
        budget.add_request("a")
    assert sum(budget.take(1, tenant="a") for _ in range(1000)) == budget.limit / 2


def test_a_quiet_time_saves_up_retries_up_to_the_limit() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.add_request()
    assert sum(budget.take(1) for _ in range(1000)) == budget.limit
