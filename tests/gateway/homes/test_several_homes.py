"""One router over two PD clusters that share a PrfaaS cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from prfaas.contracts.gateway_api import ClusterUse
from prfaas.errors import ConnectionLost, RequestError
from prfaas.gateway.homes.request_homes import RequestHomes
from prfaas.gateway.placement import PlacementRequest
from prfaas.scheduler.request import Route
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import gateway_request
from tests.gateway.homes.regions import (
    E0,
    E1,
    EAST,
    F0,
    FAR,
    LONG,
    SHORT,
    W0,
    W1,
    WEST,
    Regions,
    regions,
)


async def placed(one: Regions, placement: PlacementRequest) -> Route:
    return (await one.router.place(placement, 1.0)).route


def lose(one: Regions, *nodes: NodeId) -> None:
    for node in nodes:
        one.fleet.record_problem(one.member(node), "engine", ConnectionLost("it has exited"))


async def test_a_request_is_served_at_its_home() -> None:
    one = regions(FakeClock())
    for home, nodes in ((EAST, (E0, E1)), (WEST, (W0, W1))):
        short = await placed(one, one.placement(home, SHORT))
        assert (short.prefill, short.decode) == nodes
        long = await placed(one, one.placement(home, LONG))
        assert (long.cluster, long.decode, long.decode_cluster) == (FAR, nodes[1], home)


async def test_a_home_that_is_lost_is_served_elsewhere_until_it_returns() -> None:
    one = regions(FakeClock())
    lose(one, W0, W1)
    moved = await placed(one, one.placement(WEST, SHORT))
    assert (moved.prefill, moved.decode_cluster) == (E0, EAST) and moved.round_trip_s == 0.03
    assert "its home cannot serve it" in moved.reason
    for node, name in ((W0, "w0"), (W1, "w1")):
        one.fleet.record_card(one.member(node), one.member(E0).card)  # type: ignore[arg-type]
        assert one.member(node).node == name
    one.fleet.refresh()
    assert (await placed(one, one.placement(WEST, SHORT, 1))).decode == W1


async def test_a_drained_cluster_gets_no_new_requests() -> None:
    one = regions(FakeClock())
    one.fleet.set_drained(frozenset({FAR}))
    assert (await placed(one, one.placement(EAST, LONG))).prefill == E0
    one.fleet.set_drained(frozenset({WEST}))
    assert (await placed(one, one.placement(WEST, LONG, 1))).decode == E1
    assert one.fleet.changed.is_set(), "the plans change, too"
    one.fleet.set_drained(frozenset())
    assert (await placed(one, one.placement(WEST, LONG, 2))).decode == W1


async def test_without_a_link_between_them_a_lost_home_waits() -> None:
    one = regions(FakeClock(), decode_elsewhere=False)
    lose(one, W0, W1)
    waiting = one.placement(WEST, SHORT)
    with pytest.raises(RequestError, match="no node"):
        await one.router.place(waiting, 0.01)
    assert (await placed(one, one.placement(EAST, SHORT, 1))).decode == E1, "others do not wait"


async def test_a_home_without_a_plan_is_served_elsewhere() -> None:
    """It was lost before its gateway started."""
    one = regions(FakeClock())
    other = regions(FakeClock())
    lose(other, W0, W1)
    other.router._decisions.plans = {EAST: one.router.plans[EAST]}
    assert (await placed(other, other.placement(WEST, SHORT))).decode == E1


async def test_a_home_that_is_ahead_of_its_share_waits_for_the_other() -> None:
    """Another gateway says that `west` has had nothing of the PrfaaS cluster."""
    uses: dict[ClusterId, ClusterUse] = {}

    def other_uses(cluster: ClusterId, now_s: float) -> Mapping[ClusterId, ClusterUse]:
        return uses if cluster == FAR else {}

    one = regions(FakeClock(), other_uses)
    assert (await placed(one, one.placement(EAST, 40 * LONG, 1))).prefill == F0
    held = one.router.try_dispatch(one.placement(EAST, 40 * LONG, 2))
    assert held is not None and held.cluster == FAR and "west" in held.reason
    assert (await placed(one, one.placement(WEST, 40 * LONG, 3))).prefill == F0
    uses[WEST] = ClusterUse(1e6, False)  # its gateway has sent much more
    assert one.router.try_dispatch(one.placement(EAST, 40 * LONG, 4)) is None


async def test_requests_of_one_home_do_not_wait_behind_those_of_another() -> None:
    one = regions(FakeClock(), decode_elsewhere=False)
    lose(one, W0, W1)
    waiting = [one.placement(WEST, SHORT, number) for number in range(9)]
    tasks = [asyncio.create_task(one.router.place(each, 60.0)) for each in waiting]
    await asyncio.sleep(0)
    assert len(one.router.waiting_room) == 9
    assert (await placed(one, one.placement(EAST, SHORT, 20))).decode == E1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(one.router.waiting_room) == 0


async def test_the_home_of_a_request() -> None:
    one = regions(FakeClock())
    shares = {EAST: 0.6, WEST: 0.4}
    prompt = one.placement(EAST, SHORT).prompt
    every = RequestHomes(one.router, shares, None)
    asked = gateway_request(list(range(SHORT)))

    def named(cluster: str) -> ClusterId:
        return every.of(replace(asked, cluster=cluster), prompt)

    assert (named("east"), named("west")) == (EAST, WEST)
    assert {every.of(asked, prompt) for _ in range(10)} == {EAST, WEST}
    with pytest.raises(RequestError, match="receives requests of east, west") as refused:
        named("far")
    assert refused.value.status == 400 and refused.value.param == "X-Prfaas-Cluster"
    only = RequestHomes(one.router, shares, WEST)
    assert only.of(asked, prompt) == WEST
    with pytest.raises(RequestError, match="receives requests of west"):
        only.of(replace(asked, cluster="east"), prompt)
