from __future__ import annotations

import pytest

from prfaas.errors import RequestError
from prfaas.gateway.dispatch.attempts import PATIENCE_S, Attempts
from prfaas.gateway.dispatch.handoff import Failed, Later
from prfaas.gateway.dispatch.retry_budget import MAX_ATTEMPTS, RetryBudget
from prfaas.gateway.request import RequestTrace
from prfaas.gateway.router import Router
from prfaas.testing.clock import FakeClock
from prfaas.types import NotNow
from tests.gateway.test_router import LONG, A, B, C, F, router, seeker


def tries(clock: FakeClock) -> tuple[Attempts, Router, RequestTrace]:
    subject, story = router(clock), RequestTrace(clock.now(), attempts=1)
    return Attempts(subject, RetryBudget(), clock, story), subject, story


async def test_after_a_failed_remote_prefill_all_remote_nodes_are_avoided() -> None:
    clock = FakeClock()
    subject, at, story = tries(clock)
    booking = await at.place(seeker(LONG, clock), 1.0)
    subject.failed(Failed("it broke", B), booking)
    assert (subject.avoid, story.failures) == ({B}, ["it broke"])
    subject.failed(Failed("it broke", F, prefill=True), booking)
    assert subject.avoid == {B, F}


async def test_an_attempt_too_many_is_refused_with_the_reason() -> None:
    clock = FakeClock()
    subject, at, story = tries(clock)
    booking = await at.place(seeker(LONG, clock), 1.0)
    story.attempts = MAX_ATTEMPTS
    with pytest.raises(RequestError, match="it broke") as refused:
        subject.failed(Failed("it broke", A), booking)
    assert refused.value.status == 503 and refused.value.retry_after_s


def test_not_now_means_another_node_and_then_a_rest() -> None:
    clock = FakeClock()
    subject, _, story = tries(clock)
    subject.put_off(Later(B, NotNow("full", 5.0)))
    assert (subject.avoid, story.attempts) == ({B}, 0), "nothing was tried"
    story.attempts = 1
    subject.put_off(Later(C, NotNow("full", 5.0)))
    assert subject.avoid == frozenset(), "after a rest, everybody again"
    clock.advance(PATIENCE_S - 1)
    subject.put_off(Later(B, NotNow("full", 5.0)))
    with pytest.raises(RequestError, match="full") as refused:
        subject.put_off(Later(C, NotNow("full", 5.0)))
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5.0)
