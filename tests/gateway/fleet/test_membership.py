from __future__ import annotations

from prfaas.gateway.client.node_client import Card
from prfaas.gateway.fleet.membership import (
    DEAD_AFTER_S,
    FORGOTTEN_AFTER_S,
    HUNG_AFTER_S,
    Member,
    Membership,
)
from prfaas.types import ClusterId, NodeId
from tests.gateway.backs import FAR, HOME, deployment
from tests.gateway.reports import report

HOME_NODE = {"url": "http://h:1", "kvd_url": "http://h:2/"}
FAR_NODE = {"url": "http://f:1", "kvd_url": "http://f:2"}


def members() -> tuple[Membership, Member, Member]:
    subject = Membership(
        deployment([HOME_NODE, {**HOME_NODE, "kvd_url": "http://g:2"}], [FAR_NODE])
    )
    home, _, far = subject
    return subject, home, far


def answer(subject: Membership, member: Member, name: str, now_s: float, **more: str) -> bool:
    fresh = subject.heard(member, report(name, **more), now_s)
    member.card, member.engine_heard_s = Card("m", None, ours=True), now_s
    return fresh


def test_who_answers_is_alive_until_silent_for_too_long() -> None:
    subject, home, far = members()
    assert [m.cluster for m in subject] == [HOME, HOME, FAR]
    assert home.kvd_url == "http://h:2" and not home.alive(0.0)
    answer(subject, home, "a", 10.0)
    assert home.alive(10.0) and home.alive(10.0 + 0.99 * DEAD_AFTER_S)
    assert not home.alive(10.0 + DEAD_AFTER_S)
    assert subject.named(NodeId("a")) is home and not far.alive(10.0)


def test_who_is_silent_for_longer_still_has_hung() -> None:
    subject, home, far = members()
    assert not home.hung(1000.0), "it was never heard: it may be on its way"
    answer(subject, home, "a", 10.0)
    assert not home.hung(10.0 + HUNG_AFTER_S) and home.hung(10.1 + HUNG_AFTER_S)
    home.kvd_heard_s = 11.0 + HUNG_AFTER_S
    assert home.hung(10.1 + HUNG_AFTER_S), "half of it is of no use"


def test_half_a_node_is_none() -> None:
    subject, home, _ = members()
    subject.heard(home, report("a"), 10.0)
    assert not home.alive(10.0), "no engine"
    subject.heard(home, report("a", registered=False), 10.0)
    home.card, home.engine_heard_s = Card("m", None, ours=True), 10.0
    assert not home.alive(10.0), "an engine that its kvd does not know"


def test_a_failed_request_counts_until_the_next_answer() -> None:
    subject, home, _ = members()
    answer(subject, home, "a", 10.0)
    home.engine_failed_s = 10.5
    assert not home.alive(10.6)
    answer(subject, home, "a", 11.0)
    assert home.alive(11.0)


def test_a_new_process_is_told_apart() -> None:
    subject, home, _ = members()
    assert answer(subject, home, "a", 10.0)
    assert not answer(subject, home, "a", 11.0)
    assert answer(subject, home, "a", 12.0, instance="second")


def test_a_name_belongs_to_the_first() -> None:
    subject, home, far = members()
    answer(subject, home, "a", 10.0)
    assert not answer(subject, far, "a", 10.0)
    assert subject.named(NodeId("a")) is home and far.report is None


def test_incompatible_with_the_decode_side() -> None:
    subject, home, far = members()
    answer(subject, far, "f", 10.0, revision="2")
    assert subject.differences(far) == (), "nothing to compare with yet"
    answer(subject, home, "a", 10.0)
    assert subject.differences(home) == ()
    assert subject.differences(far) == ("revision: 1 here, 2 there",)


def test_registered_ones_are_forgotten_and_listed_ones_never() -> None:
    subject, home, _ = members()
    new = subject.registered("http://n:2", ClusterId(FAR), 5.0)
    assert new is not None and not new.listed
    assert subject.registered("http://n:2/", ClusterId(FAR), 6.0) is None
    assert subject.registered("http://h:2", ClusterId(HOME), 6.0) is None, "listed"
    assert subject.forgotten(5.0 + FORGOTTEN_AFTER_S) == []
    assert subject.forgotten(5.1 + FORGOTTEN_AFTER_S) == [new]
    subject.drop(new)
    assert len(subject) == 3
