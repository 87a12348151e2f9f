from __future__ import annotations

import asyncio

import pytest

from prfaas.cache.hashing import PromptHashes
from prfaas.errors import RequestError
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.membership import HUNG_AFTER_S
from prfaas.gateway.router import PlacementRequest, Router
from prfaas.scheduler.plan import plan_for_nodes, with_instances
from prfaas.scheduler.request import Request
from prfaas.scheduler.waiting import Hold
from prfaas.testing.clock import FakeClock
from prfaas.types import LinkStats, NodeId
from tests.gateway.backs import FAR, HOME, THRESHOLD, deployment, problem, prompt, until
from tests.gateway.reports import appear, report

A, B, C, F = (NodeId(name) for name in "abcf")
HOMES = [{"url": f"http://{n}:1", "kvd_url": f"http://{n}:2"} for n in "abc"]
FARS = [{"url": "http://f:1", "kvd_url": "http://f:2"}]
LONG, SHORT = 2 * THRESHOLD, THRESHOLD // 2


def router(clock: FakeClock, **scheduler: object) -> Router:
    """Everybody is there; `a` prefills, `b` and `c` decode."""
    made = deployment(HOMES, FARS, **scheduler)
    solved = problem(made)
    subject = Router(made, solved, clock, None)
    for member, name in zip(subject.members, "abcf", strict=True):
        appear(subject, member, name, clock.now())
    subject.plan = plan_for_nodes(
        with_instances(solved, (1,), 3),
        dict.fromkeys([A, B, C]),
        made.scheduler.replan,
        clock.now(),
        reason="test",
    )
    subject.roles = dict(subject.plan.roles)
    subject.refresh()
    return subject


def seeker(tokens: int, clock: FakeClock, *avoid: NodeId) -> PlacementRequest:
    return PlacementRequest(Request(0, tokens, clock.now()), PromptHashes(prompt(tokens)), avoid)


async def placed(subject: Router, who: PlacementRequest) -> tuple[str, str]:
    route = (await subject.place(who, 1.0)).route
    return route.prefill, route.decode


async def test_routes_as_the_scheduler_says() -> None:
    clock = FakeClock()
    subject = router(clock)
    assert await placed(subject, seeker(LONG, clock)) == (F, B)
    assert await placed(subject, seeker(SHORT, clock)) == (A, C), "b has one already"


def test_whoever_waits_for_a_node_that_has_hung_gives_up_once() -> None:
    clock = FakeClock()
    subject = router(clock)
    gave_up: list[str] = []
    with (
        subject.unless_silent(B, lambda: gave_up.append("b"), begun=False),
        subject.unless_silent(B, lambda: gave_up.append("b streams"), begun=True),
        subject.unless_silent(C, lambda: gave_up.append("c"), begun=False),
    ):
        with subject.unless_silent(B, lambda: gave_up.append("has its answer"), begun=False):
            pass
        clock.advance(HUNG_AFTER_S)
        subject.tick()
        assert gave_up == [] and not subject.hung(B)
        clock.advance(1.0)
        b, c = (subject.members.named(node) for node in (B, C))
        assert b is not None and c is not None
        appear(subject, c, "c", clock.now())
        b.engine_heard_s = clock.now()  # its kvd is silent: an answer does not need that any more
        subject.tick()
        subject.tick()
        assert gave_up == ["b"] and subject.hung(B) and not subject.hung(C)
        clock.advance(HUNG_AFTER_S + 1.0)
        appear(subject, c, "c", clock.now())
        subject.tick()
        assert gave_up == ["b", "b streams"]


async def test_one_token_is_nothing_to_hand_off() -> None:
    clock = FakeClock()
    assert await placed(router(clock), seeker(1, clock)) == (B, B)


async def test_to_avoid_somebody_is_a_preference() -> None:
    clock = FakeClock()
    subject = router(clock)
    assert await placed(subject, seeker(LONG, clock, F)) == (A, B)
    assert (await placed(subject, seeker(LONG, clock, B, C)))[1] in (B, C)
    assert (await placed(subject, seeker(LONG, clock, A, F)))[0] in (A, F)


async def test_who_failed_gets_nothing_until_it_answers() -> None:
    clock = FakeClock()
    subject = router(clock)
    clock.advance(0.1)
    subject.engine_failed(F)
    assert (await placed(subject, seeker(LONG, clock)))[0] == A
    clock.advance(0.1)
    far = subject.members.named(F)
    assert far is not None
    subject.loaded(far, Load(0, 0), clock.now(), 0)
    assert (await placed(subject, seeker(LONG, clock)))[0] == F


async def test_silence_ends_a_nodes_use() -> None:
    clock = FakeClock()
    subject = router(clock)
    clock.advance(100.0)
    for member in subject.members:
        if member.node != F:
            appear(subject, member, str(member.node), clock.now())
    subject.tick()
    assert subject.live(subject.remotes[0]) == []
    assert (await placed(subject, seeker(LONG, clock)))[0] == A


async def test_incompatible_nodes_are_shown_and_not_used() -> None:
    clock = FakeClock()
    subject = router(clock)
    far = subject.members.named(F)
    assert far is not None
    subject.heard(far, report("f", revision="2"))
    assert subject.members.differences(far)
    assert (await placed(subject, seeker(LONG, clock)))[0] == A


async def test_nobody_decodes_so_it_waits_and_is_woken() -> None:
    clock = FakeClock()
    subject = router(clock)
    subject.draining |= {B, C}
    subject.refresh()

    waiting = asyncio.create_task(subject.place(seeker(LONG, clock), 30.0))
    await until(lambda: len(subject.held) == 1)
    subject.draining.clear()
    subject.refresh()
    assert (await waiting).route.decode == B
    assert not subject.held


async def test_a_free_node_goes_to_the_first_in_line_before_a_new_request() -> None:
    """The line gets it in the moment in which the new request comes: no report, and no end of a
    prefill, has to come first."""
    clock = FakeClock()
    subject = router(clock, policy="adaptive", adaptive={"queue_s": 0.0})
    subject.engine_failed(A)  # so that F alone prefills
    first = seeker(LONG, clock)
    subject.held.put(first, Hold("test", subject.remotes[0], 0.1, clock.now()))
    clock.advance(10.0)

    new = seeker(LONG, clock)
    waiting = asyncio.create_task(subject.place(new, 30.0))
    await until(lambda: first.placed.is_set())
    assert first.booking is not None and first.booking.route.prefill == F
    assert new.booking is None and len(subject.held) == 1
    clock.advance(first.booking.route.prefill_s)
    first.booking.prefilled(clock.now())
    first.booking.close(clock.now())
    assert await waiting is new.booking and not subject.held


async def test_waiting_is_bounded() -> None:
    clock = FakeClock()
    subject = router(clock)
    subject.draining |= {B, C}
    subject.refresh()
    with pytest.raises(RequestError) as refused:
        await subject.place(seeker(LONG, clock), 0.0)
    assert refused.value.status == 503 and refused.value.retry_after_s
    assert not subject.held


async def test_a_request_that_leaves_the_waiting_room_leaves_nothing() -> None:
    """Also when it is placed in the moment in which it is cancelled."""
    clock = FakeClock()
    subject = router(clock)
    subject.draining |= {B, C}
    subject.refresh()
    before = subject.board.view(0.0, {}, {})

    for at_once in (False, True):
        waiting = asyncio.create_task(subject.place(seeker(LONG, clock), 30.0))
        await until(lambda: len(subject.held) == 1)
        if at_once:
            subject.draining.clear()
            subject.refresh()
            assert subject.board.node(B).active == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() and not subject.held
    subject.draining |= {B, C}
    subject.refresh()
    subject.board.forget_work(F)
    start = before.remotes[0].nodes[0]
    assert subject.board.node(F) == start._replace(free_at_s=subject.board.node(F).free_at_s)
    assert subject.board.node(B).active == 0


async def test_a_queue_is_known_although_nodes_only_count() -> None:
    clock = FakeClock()
    subject = router(clock)
    far = subject.members.named(F)
    assert far is not None
    booking = await subject.place(seeker(LONG, clock), 1.0)
    work_s = booking.route.prefill_s
    clock.advance(work_s / 2)
    subject.loaded(far, Load(1, 0), clock.now(), 1)
    assert subject.board.node(F).free_at_s == pytest.approx(work_s)
    clock.advance(work_s / 2)
    booking.prefilled(clock.now())
    subject.loaded(far, Load(0, 0), clock.now(), 0)
    assert subject.board.node(F).free_at_s == pytest.approx(clock.now())


async def test_a_cut_link_is_noticed_and_forgiven() -> None:
    clock = FakeClock()
    subject = router(clock)
    far = subject.members.named(F)
    assert far is not None
    link = (subject.remotes[0], subject.local)
    assert (FAR, HOME) == link

    def say(at_s: float, connections: int) -> None:
        waited_s = 0.0 if connections else 1.0
        stats = LinkStats("b:7400", at_s, connections, 0.0, 1000, 0, waited_s=waited_s)
        subject.heard(far, report("f", links=(stats,)))
        subject.tick()

    say(1.0, 0)
    clock.advance(2.0)
    assert subject.cut_for_s(link) == 2.0
    assert (await placed(subject, seeker(2 * LONG, clock)))[0] == A
    say(2.0, 4)
    assert subject.cut_for_s(link) == 0.0
    # The link has yet to show that it is clear: until then the threshold is raised.
    assert (await placed(subject, seeker(2 * LONG, clock)))[0] == F


async def test_a_forgotten_node_leaves_when_nothing_of_ours_is_there() -> None:
    clock = FakeClock()
    subject = router(clock)
    far = subject.members.named(F)
    assert far is not None
    booking = await subject.place(seeker(LONG, clock), 1.0)
    subject.forget(far)
    assert booking.route.prefill == F and not subject.board.node(F).usable
    assert (await placed(subject, seeker(LONG, clock)))[0] == A
    booking.close(clock.now())
    subject.tick()
    assert F not in subject.board and len(subject.members) == 3


async def test_a_kvd_that_comes_back_under_another_name_is_another_node() -> None:
    clock = FakeClock()
    subject = router(clock)
    far = subject.members.named(F)
    assert far is not None
    subject.heard(far, report("g", instance="second"))
    assert F not in subject.board and subject.members.named(F) is None
    assert (await placed(subject, seeker(LONG, clock)))[0] == "g"
