"""Gateways that poll each other over sockets."""

from __future__ import annotations

import logging

import msgspec
import pytest

from prfaas.clock import MonotonicClock
from prfaas.config.deployment import GatewayEntry
from prfaas.contracts.gateway_api import (
    MAX_REPORT_BYTES,
    REPORT_PATH,
    NodeLoad,
)
from prfaas.gateway.peers.peers import OthersWork, PeerGateways
from prfaas.security.shared_key import SharedKey
from prfaas.types import ClusterId, NodeId
from tests.gateway.backends import until
from tests.gateway.peer_gateways.gateways import gateways, polling
from tests.gateway.peer_gateways.reports import report
from tests.gateway.peers import Peer, peer

GET = f"GET {REPORT_PATH}"
NODE = NodeId("north-0")
WEST, SOUTH = ClusterId("west"), ClusterId("south")
NOTHING = OthersWork(0, 0.0, 0)


def living(peers: PeerGateways) -> set[str]:
    return {status.cluster for status in peers.living()}


def others(peers: PeerGateways) -> OthersWork:
    return peers.others_at(NODE, MonotonicClock().now())


def recorded(peers: PeerGateways, home: ClusterId) -> list[int]:
    window = peers.traffic[home].window(MonotonicClock().now(), (), set())
    return [int(tokens) for tokens in window.new_tokens]


def at(scripted: Peer) -> GatewayEntry:
    return GatewayEntry("west", scripted.url)


async def test_what_the_others_have_is_summed_up() -> None:
    async with gateways("east", "west", "south") as made:
        east, west, south = made
        for gateway in (west, south):
            gateway.backend.loads = {NODE: NodeLoad(2, 5000.0, 1)}
        async with polling([one.entry for one in made]) as peers:
            west.backend.finish_request(10)
            south.backend.finish_request(20)
            await until(lambda: (recorded(peers, WEST), recorded(peers, SOUTH)) == ([10], [20]))
            await until(lambda: living(peers) == {"west", "south"})
            await until(lambda: others(peers)[0::2] == (4, 2) and 5000 < others(peers)[1] < 10000)
            assert not east.backend.polls
            assert peers.others_at(NodeId("other"), MonotonicClock().now()) == NOTHING
            assert peers.highest_epoch() == 0
            assert {status.url for status in peers.statuses()} == {west.url, south.url}


async def test_a_killed_gateway_counts_no_more_until_it_is_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with gateways("west", "south") as made:
        west, south = made
        async with polling([one.entry for one in made]) as peers:
            west.backend.loads = {NODE: NodeLoad(2, 0.0, 1)}
            west.backend.followed, west.backend.plans, west.backend.epoch = (4, 2), True, 4
            south.backend.epoch = 3
            for number in range(1, 4):
                west.backend.finish_request(number)
            await until(lambda: len(recorded(peers, WEST)) == 3 and others(peers).decodes == 1)
            first = {status.cluster: status for status in peers.statuses()}
            assert first[WEST].plans and first[WEST].followed == (4, 2)
            await until(lambda: peers.highest_epoch() == 4)

            await west.kill()
            await until(lambda: living(peers) == {"south"})
            assert others(peers) == NOTHING
            assert peers.highest_epoch() == 3, "what a dead gateway has said does not count"
            assert f"the gateway of west at {west.url} does not answer" in caplog.text

            await west.start()
            for number in range(10, 15):
                west.backend.finish_request(number)
            await until(lambda: recorded(peers, WEST) == [1, 2, 3, *range(10, 15)])
            await until(lambda: living(peers) == {"west", "south"})
            again = {status.cluster: status for status in peers.statuses()}
            assert again[WEST].instance != first[WEST].instance and not again[WEST].plans
            assert again[SOUTH].instance == first[SOUTH].instance
            assert f"the gateway of west at {west.url} answers" in caplog.text


async def test_the_state_shows_which_clusters_each_gateway_has_drained() -> None:
    async with gateways("west") as (west,), polling([west.entry]) as peers:
        west.backend.drained = frozenset({"north"})
        await until(lambda: peers.statuses()[0].drained == {"north"})
        assert msgspec.to_builtins(peers.statuses()[0])["drained"] == ["north"]
        west.backend.drained = frozenset()
        await until(lambda: peers.statuses()[0].drained == frozenset())


async def test_a_gateway_that_starts_later_is_found() -> None:
    async with gateways("west") as (west,):
        await west.kill()
        async with polling([west.entry]) as peers:
            await until(lambda: peers.statuses()[0].problem != "")
            assert not peers.living() and peers.statuses()[0].instance == ""
            await west.start()
            await until(lambda: living(peers) == {"west"} and not peers.statuses()[0].problem)


async def test_a_gateway_that_is_slow_is_not_alive(caplog: pytest.LogCaptureFixture) -> None:
    async with peer() as west, polling([at(west)]) as peers:
        await west.script(GET, report(loads={NODE: NodeLoad(1, 0.0, 0)}))
        await until(lambda: others(peers).prefills == 1)
        west.silence(GET)
        await until(lambda: not peers.living())
        assert others(peers) == NOTHING and "no response in time" in caplog.text
        await west.script(GET, report())
        await until(lambda: living(peers) == {"west"})


async def test_a_gateway_that_closes_its_connections_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with peer() as west, polling([at(west)]) as peers:
        west.lose(GET)
        await west.requested(GET, times=3)
        assert not peers.living() and "does not answer as it should" in caplog.text


@pytest.mark.parametrize("given", [SharedKey(["another member key"]), None])
async def test_a_wrong_key_is_refused(
    given: SharedKey | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateways("west") as (west,), polling([west.entry], key=given) as peers:
        await until(lambda: peers.statuses()[0].problem != "")
        assert not peers.living() and not west.backend.polls
        assert "this path requires the member key" in caplog.text


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (b" " * (MAX_REPORT_BYTES + 1), 200, f"more than {MAX_REPORT_BYTES} bytes"),
        (b"{", 200, "unexpected response"),
        (b"[" * 100_000, 200, "unexpected response"),
        ("a page", 200, "unexpected response"),
        ({"cluster": "west"}, 200, "missing required field `instance`"),
        (report(epoch=1), 500, "HTTP 500"),
        ({**msgspec.to_builtins(report()), "epoch": -1}, 200, "$.epoch"),
        ({**msgspec.to_builtins(report()), "rows": [[0, 1, 1, 1, 0]] * 513}, 200, "$.rows"),
        ({**msgspec.to_builtins(report()), "loads": {"n": [1e99]}}, 200, "$.loads"),
        (report(cluster="south"), 200, "it is the gateway of 'south'"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_bad_report_is_ignored_with_a_reason(
    answer: object, status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with peer() as west, gateways("south") as (south,):
        await west.script(GET, answer, status)
        async with polling([at(west), south.entry]) as peers:
            await west.requested(GET, times=2)
            problem = peers.statuses()[0].problem
            assert reason in problem and problem in caplog.text
            assert caplog.text.count(f"the gateway of west at {west.url} does not") == 1
            assert peers.highest_epoch() == 0
            # The others are polled on, and this one as well.
            await until(lambda: living(peers) == {"south"})
            await west.script(GET, report(epoch=7))
            await until(lambda: living(peers) == {"west", "south"})
            assert peers.highest_epoch() == 7


async def test_a_poll_names_the_last_row_that_has_arrived() -> None:
    row = (0.0, 1, 1, 1, 0.0)
    async with peer() as west, polling([at(west)]) as peers:
        await west.script(GET, report(rows=[row] * 5))
        await until(lambda: {"after": "5"} in west.queries.get(GET, []))
        assert west.queries[GET][0] == {"after": "0"}
        # The same rows again are known.
        await west.requested(GET, times=len(west.bodies[GET]) + 2)
        assert len(recorded(peers, WEST)) == 5


async def test_an_only_gateway_polls_no_other_one() -> None:
    async with gateways("east") as (east,), polling([east.entry]) as peers:
        assert not peers.statuses() and not peers.traffic and others(peers) == NOTHING
    assert not east.backend.polls
