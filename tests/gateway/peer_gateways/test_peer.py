from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.deployment import GatewayEntry
from prfaas.contracts.gateway_api import ClusterUse, NodeLoad
from prfaas.errors import ConnectionLost, MalformedResponse, PeerError, PeerHttpError
from prfaas.gateway.peers.peer import ALIVE_S, OVERDUE_S, Peer
from prfaas.gateway.peers.traffic_rows import TrafficFollower
from prfaas.lateness import LateSince, never_late
from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.types import ClusterId, NodeId
from tests.gateway.peer_gateways.reports import report

NODE, NORTH = NodeId("north-0"), ClusterId("north")
LOADED = report(
    plans=True,
    followed=(2, 7),
    loads={NODE: NodeLoad(3, 1.0, 4)},
    uses={NORTH: ClusterUse(8.0, True)},
)


def peer(late_since: LateSince = never_late) -> Peer:
    follower = TrafficFollower(TrafficHistory(0.0, 60.0), 0.0)
    return Peer(GatewayEntry("west", "http://west:8080/"), follower, late_since)


def test_a_peer_that_has_not_answered_is_not_alive_and_has_nothing() -> None:
    one = peer()
    assert not one.is_alive(0.0) and one.load_at(NODE, 0.0) is None
    assert one.use_of(NORTH, 0.0, 20.0) is None
    status = one.status(0.0)
    assert (status.instance, status.followed, status.plans) == ("", None, False)
    assert (status.cluster, status.url) == ("west", "http://west:8080")


def test_work_is_counted_down_and_use_decays_since_the_report() -> None:
    one = peer()
    one.receive(LOADED, 0, 10.0)
    assert one.load_at(NODE, 10.0) == NodeLoad(3, 1.0, 4)
    assert one.load_at(NODE, 10.25) == NodeLoad(3, 0.75, 4)
    assert one.load_at(NODE, 11.0) == NodeLoad(3, OVERDUE_S, 4), "its prefills have not ended"
    assert one.load_at(NodeId("other"), 10.0) is None
    use = one.use_of(NORTH, 11.0, 2.0)
    assert use is not None and use.wants and math.isclose(use.used_s, 8.0 * math.exp(-0.5))


def test_a_dead_peers_loads_and_uses_do_not_count() -> None:
    one = peer()
    one.receive(LOADED, 0, 10.0)
    assert one.is_alive(10.0 + ALIVE_S) and one.status(10.0).plans
    dead_s = 10.0 + ALIVE_S + 0.01
    assert not one.is_alive(dead_s) and one.load_at(NODE, dead_s) is None
    assert one.use_of(NORTH, dead_s, 20.0) is None
    status = one.status(dead_s)
    assert (status.alive, status.plans, status.followed) == (False, False, (2, 7))
    one.receive(LOADED, 0, dead_s)
    assert one.is_alive(dead_s)


@given(st.floats(0, 100), st.floats(0, 10))
def test_the_gateways_own_lateness_is_no_silence_of_the_peer(late_s: float, more_s: float) -> None:
    one = peer(lambda since_s: late_s)
    one.receive(LOADED, 0, 0.0)
    assert one.is_alive(ALIVE_S + late_s * 0.999)
    assert one.is_alive(late_s + more_s) == (late_s + more_s - late_s <= ALIVE_S)


def test_a_report_of_another_gateway_is_ignored() -> None:
    one = peer()
    row = (0.0, 1, 1, 1, 0.0)
    with pytest.raises(PeerError, match="'south'.*'west'"):
        one.receive(report(cluster="south", rows=[row]), 0, 1.0)
    assert one.report is None and not one.is_alive(1.0) and one.follower.after == 0


def test_each_kind_of_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = peer()
    for error in (
        ConnectionLost("refused"),
        ConnectionLost("refused, later"),
        PeerHttpError(401, "unauthorized", "wrong key"),
        PeerHttpError(401, "unauthorized", "wrong key"),
        PeerHttpError(404, "no_other_gateways", "no report"),
        MalformedResponse("not JSON\nsecond line"),
        PeerError("of another cluster"),
    ):
        one.record_problem(error)
    assert one.status(0.0).problem == "of another cluster"
    one.receive(LOADED, 0, 0.0)
    one.receive(LOADED, 0, 0.0)
    assert one.status(0.0).problem == ""
    ends = [line.rpartition(": ")[2] for line in caplog.messages]
    assert ends == [
        *("refused", "wrong key", "no report", "not JSON second line", "of another cluster"),
        "the gateway of west at http://west:8080 answers",
    ]
