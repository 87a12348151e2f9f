from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.gateway_api import MAX_COUNT, DrainOrder
from prfaas.gateway.peers.drains import Drains, merge_orders
from prfaas.types import ClusterId

EAST, NORTH = ClusterId("east"), ClusterId("north")
CLUSTERS = (EAST, NORTH)
ORDERS = st.dictionaries(
    st.sampled_from(CLUSTERS), st.builds(DrainOrder, st.booleans(), st.integers(0, 3))
)


def drains(wall_s: float = 100.0) -> Drains:
    return Drains(CLUSTERS, lambda: wall_s)


@given(st.lists(ORDERS, max_size=5), st.randoms())
def test_the_order_of_merging_does_not_matter(
    given_orders: list[dict[ClusterId, DrainOrder]], chance: random.Random
) -> None:
    merged = merge_orders(*given_orders)
    shuffled = chance.sample(given_orders, len(given_orders))
    assert merge_orders(*shuffled, merged) == merged
    for orders in given_orders:
        for cluster, order in orders.items():
            assert merged[cluster].version >= order.version


def test_an_order_counts_until_the_next_one() -> None:
    one = drains()
    assert NORTH not in one.drained
    first = one.set(NORTH, True)
    assert (NORTH in one.drained) and EAST not in one.drained and one.orders == {NORTH: first}
    assert one.set(NORTH, False).version > first.version and NORTH not in one.drained


def test_the_newest_order_reaches_every_gateway() -> None:
    one, two = drains(), drains(wall_s=50.0)
    one.set(NORTH, True)
    assert two.merge(one.orders) and (NORTH in two.drained)
    assert not two.merge(one.orders)
    two.set(NORTH, False)  # its clock is behind
    assert one.merge(two.orders) and NORTH not in one.drained
    assert not two.merge(one.orders)


def test_of_equal_versions_the_one_that_drains_counts() -> None:
    one, two = drains(), drains()
    one.set(NORTH, True)
    two.set(NORTH, False)
    assert two.merge(one.orders) and (NORTH in two.drained)
    assert not one.merge(two.orders) and (NORTH in one.drained)


def test_a_gateway_that_has_just_started_can_end_an_earlier_order() -> None:
    one, started = drains(100.0), drains(200.0)
    one.set(NORTH, True)
    started.set(NORTH, False)
    assert one.merge(started.orders) and NORTH not in one.drained


def test_clusters_that_are_not_in_the_deployment_are_ignored() -> None:
    one = drains()
    assert not one.merge({ClusterId("elsewhere"): DrainOrder(True, 7)}) and not one.orders


def test_versions_stay_within_the_message() -> None:
    one = drains()
    one.merge({NORTH: DrainOrder(False, MAX_COUNT)})
    assert one.set(NORTH, True).version == MAX_COUNT and (NORTH in one.drained)
