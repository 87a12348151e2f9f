from __future__ import annotations

import msgspec
import pytest

from prfaas.config.gateway import DEFAULTS
from prfaas.errors import MalformedResponse, Refused, Unreachable
from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.fleet.membership import Membership
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import FAR, HOME, deployment
from tests.gateway.fleet.test_formats import changed
from tests.gateway.fleets import B, fleet_and_router, member_of
from tests.gateway.reports import NODE_CARD, appear, report

TIMEOUTS = DEFAULTS.timeouts

HOME_NODE = {"url": "http://h:1", "kvd_url": "http://h:2/"}
FAR_NODE = {"url": "http://f:1", "kvd_url": "http://f:2"}


def members() -> tuple[Membership, Member, Member]:
    subject = Membership(
        deployment([HOME_NODE, {**HOME_NODE, "kvd_url": "http://g:2"}], [FAR_NODE])
    )
    home, _, far = subject
    return subject, home, far


def answer(subject: Membership, member: Member, name: str, now_s: float, **more: str) -> bool:
    fresh = subject.record_report(member, report(name, **more), now_s)
    engine_answers(member, now_s)
    return fresh


def engine_answers(member: Member, now_s: float) -> None:
    member.card, member.engine_seen_s = NODE_CARD, now_s
    member.engine.hear(now_s)


def test_a_member_that_answers_is_alive_until_it_is_silent_for_too_long() -> None:
    subject, home, far = members()
    assert [m.cluster for m in subject] == [HOME, HOME, FAR]
    assert home.kvd_url == "http://h:2" and not home.is_alive(0.0)
    answer(subject, home, "a", 10.0)
    home.kvd.ask(10.5)
    home.engine.ask(10.6)
    assert home.is_alive(10.0) and home.is_alive(10.5 + TIMEOUTS.silent_s)
    assert not home.is_alive(10.6 + TIMEOUTS.silent_s)
    assert subject.named(NodeId("a")) is home and not far.is_alive(10.0)


def test_a_member_that_is_silent_for_longer_has_hung() -> None:
    subject, home, far = members()
    assert not home.has_hung(1000.0), "it has never answered: it may be starting"
    answer(subject, home, "a", 10.0)
    home.kvd.ask(10.0 + 1e-6)
    home.engine.ask(10.0 + 1e-6)
    assert not home.has_hung(10.0 + TIMEOUTS.hung_s) and home.has_hung(10.1 + TIMEOUTS.hung_s)
    home.kvd.hear(10.0 + TIMEOUTS.hung_s)
    assert home.has_hung(10.1 + TIMEOUTS.hung_s), "its kvd answers, its engine does not"


def test_a_node_needs_a_kvd_and_an_engine() -> None:
    subject, home, _ = members()
    subject.record_report(home, report("a"), 10.0)
    assert not home.is_alive(10.0), "no engine"
    subject.record_report(home, report("a", registered=False), 10.0)
    engine_answers(home, 10.0)
    assert not home.is_alive(10.0), "the engine has not registered with its kvd"


def test_a_failed_request_counts_until_the_next_answer() -> None:
    subject, home, _ = members()
    answer(subject, home, "a", 10.0)
    home.engine_failed_s = 10.5
    assert not home.is_alive(10.6)
    answer(subject, home, "a", 11.0)
    assert home.is_alive(11.0)


def test_a_new_process_is_recognised() -> None:
    subject, home, _ = members()
    assert answer(subject, home, "a", 10.0)
    assert not answer(subject, home, "a", 11.0)
    assert answer(subject, home, "a", 12.0, instance="second")


def test_a_process_cannot_change_its_name() -> None:
    subject, home, _ = members()
    answer(subject, home, "a", 10.0)
    with pytest.raises(MalformedResponse, match="node"):
        answer(subject, home, "b", 11.0)
    assert subject.named(NodeId("a")) is home and subject.named(NodeId("b")) is None
    assert answer(subject, home, "b", 12.0, instance="second")
    assert subject.named(NodeId("a")) is None and subject.named(NodeId("b")) is home


def test_a_name_belongs_to_the_first_member_that_reports_it() -> None:
    subject, home, far = members()
    answer(subject, home, "a", 10.0)
    assert not answer(subject, far, "a", 10.0)
    assert subject.named(NodeId("a")) is home and far.report is None


@pytest.mark.parametrize("old_is", ["silent", "refusing"])
def test_a_kvd_that_comes_back_at_a_new_address_takes_over_its_name_at_once(old_is: str) -> None:
    fleet, _ = fleet_and_router(clock := FakeClock())
    old = member_of(fleet, B)
    back = fleet.register("http://new:2", old.cluster)
    assert back is not None
    fleet.record_report(back, report("b", instance="second"))
    assert fleet.members.named(B) is old, "both answer: the first keeps the name"
    if old_is == "silent":
        clock.advance(TIMEOUTS.node_poll_s + TIMEOUTS.unresponsive_s)
    else:
        fleet.record_problem(old, "kvd", Unreachable("http://b:2: connection refused"))
    appear(fleet, back, "b", clock.now())
    fleet.refresh()
    assert fleet.members.named(B) is back and fleet.board.node(B).usable
    again = fleet.register("http://third:2", old.cluster)
    assert again is not None
    fleet.record_report(again, report("b", instance="third"))
    assert fleet.members.named(B) is back, "both answer: the first keeps the name"
    appear(fleet, old, "b", clock.now())
    assert fleet.members.named(B) is old, "it is in the deployment file"
    assert fleet.board.node(B).usable


def test_a_name_does_not_go_to_a_kvd_that_does_not_serve_the_model() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    old = member_of(fleet, B)
    thief = fleet.register("http://new:2", old.cluster)
    assert thief is not None
    fleet.record_problem(old, "kvd", Unreachable("http://b:2: connection refused"))
    without_engine = msgspec.structs.replace(report("b", instance="second"), pool=None)
    for claimed in (without_engine, changed(report("b", instance="third"), model="another")):
        fleet.record_report(thief, claimed)
        assert fleet.members.named(B) is old


def test_a_node_that_has_just_fallen_silent_keeps_its_place_in_the_plan() -> None:
    fleet, _ = fleet_and_router(clock := FakeClock())
    member = member_of(fleet, B)
    clock.advance(TIMEOUTS.node_poll_s + TIMEOUTS.unresponsive_s + 0.1)
    now = clock.now()
    assert not member.is_alive(now) and B in fleet.members.expected_nodes(member.cluster, now)
    fleet.record_engine_failure(B)
    assert B not in fleet.members.expected_nodes(member.cluster, clock.now()), "it refuses"
    clock.advance(TIMEOUTS.hung_s)
    assert not fleet.members.expected_nodes(member.cluster, clock.now())


def test_a_node_that_has_exited_leaves_the_plan_and_does_not_return_to_it_as_silent() -> None:
    fleet, _ = fleet_and_router(clock := FakeClock())
    member = member_of(fleet, B)
    clock.advance(TIMEOUTS.node_poll_s)
    fleet.record_problem(member, "engine", Refused("http://b:1: connection refused"))
    assert B not in fleet.members.expected_nodes(member.cluster, clock.now())
    clock.advance(TIMEOUTS.unresponsive_s)
    assert member.is_silent(clock.now()) and not member.has_hung(clock.now())
    assert B not in fleet.members.expected_nodes(member.cluster, clock.now())
    fleet.record_card(member, NODE_CARD)
    fleet.record_load(member, Load(0, 0), leaving=False, asked_s=clock.now() + 0.1, own=0)
    clock.advance(0.2)
    fleet.record_report(member, report("b"))
    assert member.is_alive(clock.now()), "it has returned"


def test_a_process_cannot_change_its_format() -> None:
    """A kvd has the format of its first engine until it exits."""
    subject, home, _ = members()
    answer(subject, home, "a", 10.0)
    with pytest.raises(MalformedResponse, match="format"):
        answer(subject, home, "a", 11.0, revision="2")
    assert home.compat is not None and home.compat.revision == "1"
    assert answer(subject, home, "a", 12.0, instance="second", revision="2")
    assert home.compat.revision == "2"


def test_registered_members_expire_and_listed_members_do_not() -> None:
    subject, home, _ = members()
    new = subject.register("http://n:2", ClusterId(FAR), 5.0)
    assert new is not None and not new.listed
    assert subject.register("http://n:2/", ClusterId(FAR), 6.0) is None
    assert subject.register("http://h:2", ClusterId(HOME), 6.0) is None, "listed"
    assert subject.expired(5.0 + TIMEOUTS.forget_s) == []
    assert subject.expired(5.1 + TIMEOUTS.forget_s) == [new]
    subject.remove(new)
    assert len(subject) == 3
