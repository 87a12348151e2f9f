from __future__ import annotations

import msgspec
import pytest

from prfaas.types import ClusterId, LinkStats
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import FAR, HOME
from tests.gateway.fleets import LONG, A, B, F, fleet_and_router, member_of, place, placement, step
from tests.gateway.reports import report


async def test_a_cut_link_is_not_used_until_it_is_restored() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    link = (fleet.remotes[0], fleet.homes[0])
    assert (FAR, HOME) == link

    def send_report(at_s: float, connections: int) -> None:
        waited_s = 0.0 if connections else 1.0
        stats = LinkStats("b:7400", at_s, connections, 0.0, 1000, 0, waited_s=waited_s)
        fleet.record_report(member_of(fleet, F), report("f", links=(stats,)))
        step(fleet, router)

    send_report(1.0, 0)
    clock.advance(2.0)
    assert fleet.links.cut_for_s(link) == 2.0
    assert (await place(router, placement(2 * LONG, clock)))[0] == A
    send_report(2.0, 4)
    assert fleet.links.cut_for_s(link) == 0.0
    # The link has yet to show that it is clear: until then the threshold is raised.
    assert (await place(router, placement(2 * LONG, clock)))[0] == F


@pytest.mark.parametrize("gone", ["the receiver", "the sender"])
async def test_a_link_that_nobody_reports_on_does_not_stay_cut(gone: str) -> None:
    """A kvd forgets a receiver that is gone. Nothing is sent over a cut link, so that without this
    rule no report would ever say that the link is restored."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    link = (fleet.remotes[0], fleet.homes[0])
    stats = LinkStats("b:7400", 1.0, 0, 0.0, 1000, 0, waited_s=1.0)
    fleet.record_report(member_of(fleet, F), report("f", links=(stats,)))
    step(fleet, router)
    clock.advance(1.0)
    assert fleet.links.cut_for_s(link) == 1.0
    if gone == "the receiver":
        fleet.record_report(member_of(fleet, F), report("f"))
    else:
        fleet.record_kvd_failure(F)
    step(fleet, router)
    assert fleet.links.cut_for_s(link) == 0.0
    assert (seen := fleet.board.link(link)) is not None and seen.up


@pytest.mark.parametrize("model", ["another-model", None])
async def test_a_member_that_does_not_serve_the_model_does_not_judge_links(
    model: str | None,
) -> None:
    """Otherwise one stolen member key would make a gateway give up a link that works."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    link = (fleet.remotes[0], fleet.homes[0])
    false = LinkStats("b:7400", 1.0, 0, 0.0, 1 << 40, 0, waited_s=1000.0)
    found = report("stranger", links=(false,))
    assert found.pool is not None
    pool = None
    if model is not None:
        compat = msgspec.structs.replace(found.pool.compat, model=model)
        pool = msgspec.structs.replace(found.pool, compat=compat)
    member = fleet.register("http://stranger:7401", ClusterId(FAR))
    assert member is not None
    fleet.record_report(member, msgspec.structs.replace(found, pool=pool))
    step(fleet, router)
    assert fleet.links.cut_for_s(link) == 0.0
    assert (seen := fleet.board.link(link)) is not None and seen.up
    clock.advance(2.0)
    assert fleet.links.cut_for_s(link) == 0.0
    assert (await place(router, placement(2 * LONG, clock)))[0] == F


def test_a_relay_is_used_between_clusters_only() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    a, b, f = (member_of(fleet, node) for node in (A, B, F))
    assert fleet.links.relay_between(f, b) is None
    b.via = "relay:1"
    assert fleet.links.relay_between(f, b) == "relay:1"
    assert fleet.links.relay_between(a, b) is None


def test_a_node_may_have_a_relay_for_each_cluster_that_sends_to_it() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    b, f = (member_of(fleet, node) for node in (B, F))
    b.via = {FAR: "relay:1", "elsewhere": "relay:2"}
    assert fleet.links.relay_between(f, b) == "relay:1"
    b.via = {"elsewhere": "relay:2"}
    assert fleet.links.relay_between(f, b) is None
