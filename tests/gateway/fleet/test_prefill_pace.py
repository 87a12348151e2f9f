from __future__ import annotations

import pytest

from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import LONG, F, fleet_and_router, placement

SLOWER = 1.5


async def test_routing_follows_nodes_that_are_slower_than_their_profile() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    cluster = fleet.remotes[0]
    first = await router.place(placement(LONG, clock), 1.0)
    assert first.route.prefill == F and not fleet.pace.factors
    first.close(clock.now())
    for _ in range(200):
        sent_s = clock.now()
        clock.advance(SLOWER * first.route.prefill_s)
        assert fleet.pace.record_prefill(first.route, LONG, 0, sent_s) == pytest.approx(sent_s)
    assert fleet.pace.factors[cluster] == pytest.approx(SLOWER)
    later = await router.place(
        placement(
            LONG,
            clock,
        ),
        1.0,
    )
    assert later.route.prefill_s == pytest.approx(SLOWER * first.route.prefill_s)
