"""What other gateways have at the nodes, as this gateway's decisions see it."""

from __future__ import annotations

from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.prefill_work import NO_WORK, OthersWork
from prfaas.testing.clock import FakeClock
from prfaas.types import NodeId
from tests.gateway.fleets import A, B, fleet_and_router, member_of
from tests.gateway.reports import load


def test_requests_of_others_count_before_and_after_their_kv_arrives() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    told: dict[NodeId, OthersWork] = {}
    fleet.work.share_with(lambda node: told.get(node, NO_WORK))

    def seen() -> tuple[int, float]:
        """Requests that decode or will decode at `b`, and seconds until `a` is free."""
        return fleet.board.node(B).active, max(0.0, fleet.board.node(A).free_at_s - clock.now())

    assert seen() == (0, 0.0)
    told |= {B: OthersWork(0, 0.0, 3), A: OthersWork(1, 5.0, 0)}
    fleet.work.record_others()
    assert seen() == (3, 5.0), "their KV is still to arrive"
    clock.advance(1.0)
    load(fleet, member_of(fleet, B), Load(running=2, waiting=0), clock.now())
    assert seen()[0] == 3, "two of them decode now"
    load(fleet, member_of(fleet, B), Load(running=5, waiting=0), clock.now())
    fleet.work.record_others()
    assert seen()[0] == 5, "two are of nobody who tells"
    told.clear()
    fleet.work.record_others()
    assert seen()[0] == 5, "as last polled"
    clock.advance(1.0)
    load(fleet, member_of(fleet, B), Load(running=0, waiting=0), clock.now())
    assert seen()[0] == 0
