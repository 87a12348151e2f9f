"""Orders to drain clusters, which the kvds keep."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.contracts.kvd_api import MOST_EPOCH, PutRecord, RecordVersion
from prfaas.gateway.planning import drains as module
from prfaas.gateway.planning.drains import Drains, record_name
from prfaas.types import ClusterId
from tests.gateway.planning.kept import Gateway, Site

EAST, NORTH = ClusterId("east"), ClusterId("north")
CLUSTERS = (EAST, NORTH)


class Ordering:
    """A gateway that takes orders."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.gateway: Gateway = site.gateway([record_name(cluster) for cluster in CLUSTERS])
        self.used: list[frozenset[ClusterId]] = []
        self.drains = Drains(CLUSTERS, self.gateway.records, site.clock, self.used.append)

    @property
    def drained(self) -> frozenset[ClusterId]:
        assert not self.used or self.used[-1] == self.drains.drained
        return self.drains.drained

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.site.clock.advance(0.5)
            await self.gateway.step()
            self.drains.step()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORE_S", 0.05)
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)


async def test_an_order_counts_at_all_gateways_and_after_their_restart() -> None:
    site = Site(3)
    one, two = Ordering(site), Ordering(site)
    await one.step()
    assert await one.drains.order(NORTH, True)
    assert one.drained == {NORTH} and one.drains.is_kept(NORTH)
    await two.step()
    assert two.drained == {NORTH}
    started = Ordering(site)
    await started.step()
    assert started.drained == {NORTH}
    assert await started.drains.order(NORTH, False)
    for each in (one, two, started):
        await each.step(2)
        assert each.drained == frozenset() and each.drains.is_kept(NORTH)
    assert len(one.used) == 2, "nothing else has changed in between"


async def test_one_host_alone_drains_nothing() -> None:
    site = Site(3)
    one = Ordering(site)
    kvd = site.kvds["http://0"]
    kvd.kept.put(PutRecord(record_name(NORTH), 0, 7, b'{"drained":true}'), 0, 0.0)
    await one.step(3)
    assert one.drained == frozenset()
    kvd.lie = lambda: (RecordVersion(record_name(NORTH), 0, MOST_EPOCH, "0" * 64),)
    assert await one.drains.order(NORTH, True), "nor does it hinder an order"
    assert await one.drains.order(NORTH, False)
    await one.step(3)
    assert one.drained == frozenset() and one.drains.is_kept(NORTH)


async def test_an_order_that_no_majority_keeps_counts_here_and_is_kept_later() -> None:
    site = Site(3)
    one, two = Ordering(site), Ordering(site)
    await one.step()
    for url in ("http://0", "http://1"):
        site.kvds[url].down = True
    one.gateway.poll()
    assert not await one.drains.order(NORTH, True)
    assert one.drained == {NORTH} and not one.drains.is_kept(NORTH)
    assert one.drains.is_kept(EAST), "there is no order"
    await two.step()
    assert two.drained == frozenset()
    for kvd in site.kvds.values():
        kvd.down = False
    await one.step(3)
    await two.step()
    assert one.drains.is_kept(NORTH) and two.drained == {NORTH}


async def test_an_order_of_a_gateway_that_had_not_read_the_earlier_ones_is_the_latest() -> None:
    """The kvds came back after the order, and keep an earlier one with a higher number."""
    site = Site(3)
    before = Ordering(site)
    await before.step()
    for number in range(5):
        assert await before.drains.order(NORTH, number % 2 == 0)
    site.clock.advance(10.0)
    for kvd in site.kvds.values():
        kvd.down = True
    started = Ordering(site)
    assert not await started.drains.order(NORTH, False)
    for kvd in site.kvds.values():
        kvd.down = False
    await started.step(20)
    assert started.drains.is_kept(NORTH) and started.drained == frozenset()
    await before.step(2)
    assert before.drained == frozenset()


async def test_two_operators_drain_two_clusters_at_two_gateways_at_once() -> None:
    site = Site(3)
    one, two = Ordering(site), Ordering(site)
    await one.step()
    await two.step()
    kept = await asyncio.gather(one.drains.order(EAST, True), two.drains.order(NORTH, True))
    assert kept == [True, True]
    await one.step(2)
    await two.step(2)
    assert one.drained == two.drained == {EAST, NORTH}


@pytest.mark.parametrize("kvds", [3, 4, 5])
async def test_of_two_orders_for_one_cluster_at_once_all_gateways_follow_the_same(
    kvds: int,
) -> None:
    """Each reaches other kvds first, so that neither has a majority with its number."""
    site = Site(kvds)
    one, two = Ordering(site), Ordering(site)
    await one.step()
    await two.step()
    urls = list(site.kvds)
    one.gateway.cut.update(urls[: kvds // 2])
    two.gateway.cut.update(urls[kvds // 2 :])
    one.gateway.poll()
    two.gateway.poll()
    await asyncio.gather(one.drains.order(NORTH, True), two.drains.order(NORTH, False))
    one.gateway.cut.clear()
    two.gateway.cut.clear()
    for _ in range(40):
        await one.step()
        await two.step()
    assert one.drained == two.drained
    assert one.drains.is_kept(NORTH) and two.drains.is_kept(NORTH)


async def test_an_order_of_a_later_version_drains_nothing() -> None:
    site = Site(1)
    site.kvds["http://0"].kept.put(PutRecord(record_name(NORTH), 0, 7, b"\xff"), 0, 0.0)
    one = Ordering(site)
    await one.step()
    assert one.drained == frozenset()
