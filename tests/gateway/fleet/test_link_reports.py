from __future__ import annotations

import msgspec
import pytest

from prfaas.config.gateway import DEFAULTS
from prfaas.gateway.fleet.links.reports import (
    ANSWERS_WITHIN_S,
    CONNECTING_S,
    STALLED_S,
    LinkReports,
    combine,
)
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.fleet.membership import Membership
from prfaas.types import LinkStats
from tests.gateway.backends import FAR, HOME, deployment
from tests.gateway.reports import report

STATS = LinkStats(
    "d:7400",
    at_s=1.0,
    connections=4,
    goodput_bps=1e9,
    backlog_bytes=500,
    in_flight_bytes=300,
    waited_s=1.0,
    late_s=0.1,
    rtt_s=0.02,
    delivery_bps=2e9,
    retransmitted_segments=3,
    congestion_window_bytes=100,
)

TIMEOUTS = DEFAULTS.timeouts
OUT = (FAR, HOME)


def test_senders_of_one_link_add_up() -> None:
    other = msgspec.structs.replace(STATS, waited_s=0.4, late_s=0.2, rtt_s=0.01, delivery_bps=None)
    total = combine([STATS, other], 50.0)
    assert (total.at_s, total.connections, total.goodput_bps) == (50.0, 8, 2e9)
    assert (total.backlog_bytes, total.in_flight_bytes) == (1000, 600)
    assert (total.waited_s, total.late_s, total.rtt_s) == (1.0, 0.2, 0.01)
    assert total.delivery_bps == 3e9, "one sender's bytes wait, so the link is full of both's"
    quiet = msgspec.structs.replace(STATS, delivery_bps=None)
    assert combine([quiet, quiet], 50.0).delivery_bps is None
    assert (total.retransmitted_segments, total.congestion_window_bytes) == (6, 200)


def test_without_connections_a_link_is_cut_only_when_something_waits() -> None:
    broken = msgspec.structs.replace(STATS, connections=0)
    assert combine([broken], 1.0).connections == 0
    assert combine([msgspec.structs.replace(broken, backlog_bytes=0)], 1.0).connections > 0
    just_ready = msgspec.structs.replace(broken, waited_s=CONNECTING_S / 2)
    assert combine([just_ready], 1.0).connections > 0, "connections are made when they are needed"


def test_what_waited_for_a_late_receiver_did_not_wait_for_the_path() -> None:
    subject, members = two_clusters()
    d, _, p = members
    members.record_report(p, report("p", links=(STATS,)), 0.0)

    def collect(late_s: float, at_s: float) -> LinkStats:
        members.record_report(d, report("d", late_s=late_s), at_s)
        stats = msgspec.structs.replace(STATS, at_s=at_s)
        members.record_report(p, report("p", links=(stats,)), at_s)
        return subject.collect(list(members), at_s)[OUT]

    assert (collect(0.0, 2.0).waited_s, collect(0.0, 3.0).delivery_bps) == (1.0, 2e9)
    assert (collect(0.75, 4.0).waited_s, collect(0.75, 5.0).delivery_bps) == (0.25, 2e9)
    assert (collect(1.5, 6.0).waited_s, collect(1.5, 7.0).delivery_bps) == (0.0, None)


def test_a_receiver_that_does_not_answer_is_late_until_it_is_dead() -> None:
    subject, members = two_clusters()
    d, _, p = members
    members.record_report(d, report("d"), 10.0)

    def waited_s(now_s: float) -> float:
        stats = msgspec.structs.replace(STATS, at_s=now_s)
        members.record_report(p, report("p", links=(stats,)), now_s)
        return subject.collect(list(members), now_s)[OUT].waited_s

    assert waited_s(10.5) == 1.0
    assert waited_s(10.0 + ANSWERS_WITHIN_S + 0.4) == pytest.approx(0.6)
    assert waited_s(12.0) == 0.0
    assert waited_s(10.0 + ANSWERS_WITHIN_S + TIMEOUTS.unresponsive_s) == 1.0, (
        "its silence explains nothing"
    )


def two_clusters(via: str | None = None) -> tuple[LinkReports, Membership]:
    made = deployment(
        [
            {"url": "http://d:1", "kvd_url": "http://d:2"},
            {"url": "http://e:1", "kvd_url": "http://e:2"},
        ],
        [{"url": "http://p:1", "kvd_url": "http://p:2"}],
    )
    link = msgspec.structs.replace(made.links[0], via=via)
    made = msgspec.structs.replace(made, links=[link])
    return LinkReports(made), Membership(made)


def test_an_address_tells_the_cluster_and_old_news_is_none() -> None:
    subject, members = two_clusters()
    d, e, p = members
    local = msgspec.structs.replace(STATS, peer="e:7400")
    unknown = msgspec.structs.replace(STATS, peer="x:7400")
    members.record_report(d, report("d", links=(local,)), 9.0)
    members.record_report(e, report("e"), 9.0)
    members.record_report(p, report("p", links=(STATS, unknown)), 9.0)
    found = subject.collect(list(members), 9.0)
    assert set(found) == {OUT} and found[OUT] == combine([STATS], 9.0)
    assert subject.collect(list(members), 10.0) == {}
    later = msgspec.structs.replace(STATS, at_s=2.0)
    members.record_report(p, report("p", links=(later,)), 11.0)
    assert set(subject.collect(list(members), 11.0)) == {OUT}


def test_a_relay_stands_for_the_cluster_behind_it() -> None:
    subject, members = two_clusters("relay:1")
    *_, p = members
    relayed = msgspec.structs.replace(STATS, peer="relay:1")
    members.record_report(p, report("p", links=(relayed,)), 9.0)
    assert set(subject.collect(list(members), 9.0)) == {OUT}
    assert subject.relay(OUT) == "relay:1"


def test_connections_over_which_nothing_passes_are_none() -> None:
    subject, members = two_clusters("relay:1")
    *_, p = members

    def connections(at_s: float, goodput_bps: float) -> int:
        stats = msgspec.structs.replace(
            STATS, peer="relay:1", at_s=at_s, goodput_bps=goodput_bps, backlog_bytes=10
        )
        members.record_report(p, report("p", links=(stats,)), at_s)
        return subject.collect(list(members), at_s)[OUT].connections

    assert connections(10.0, 0.0) > 0
    assert connections(10.0 + 0.9 * STALLED_S, 0.0) > 0
    assert connections(10.0 + STALLED_S, 0.0) == 0
    assert connections(50.0, 1e6) > 0
    assert connections(51.0, 0.0) > 0, "it counts anew"


def test_retransmissions_count_once() -> None:
    subject, members = two_clusters("relay:1")
    *_, p = members
    relayed = msgspec.structs.replace(STATS, peer="relay:1")

    def retransmitted(member: Member, stats: LinkStats) -> int | None:
        name = "p" if member is p else "q"
        members.record_report(member, report(name, links=(stats,)), 9.0)
        return subject.collect(list(members), 9.0)[OUT].retransmitted_segments

    assert retransmitted(p, relayed) == 3
    also = members.register("http://q:2", FAR, 0.0)
    assert also is not None
    assert retransmitted(also, relayed) == 3, "of the first one's nothing is new"


def test_a_dead_senders_backlog_is_not_the_links() -> None:
    """It would count as waiting for as long as the sender is a member."""
    subject, members = two_clusters("relay:1")
    *_, p = members
    q = members.register("http://q:2", FAR, 0.0)
    assert q is not None
    stuck = msgspec.structs.replace(STATS, peer="relay:1", backlog_bytes=10**12, waited_s=60.0)
    members.record_report(q, report("q", links=(stuck,)), 9.0)
    idle = msgspec.structs.replace(STATS, peer="relay:1", backlog_bytes=0, waited_s=0.0)

    def collect(at_s: float) -> LinkStats:
        stats = msgspec.structs.replace(idle, at_s=at_s)
        members.record_report(p, report("p", links=(stats,)), at_s)
        return subject.collect(list(members), at_s)[OUT]

    assert collect(9.0).backlog_bytes == 10**12
    dead_s = 9.0 + TIMEOUTS.unresponsive_s
    assert (collect(dead_s).backlog_bytes, collect(dead_s + 1.0).waited_s) == (0, 0.0)
