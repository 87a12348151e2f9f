"""The state of each node: one of five."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prfaas.errors import Refused
from prfaas.gateway.exposition.nodes import STATES, NodeState, node_metrics, observe_nodes
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.types import ClusterId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import F, fleet_and_router, member_of
from tests.gateway.reports import IDLE


def drained(fleet: Fleet) -> None:
    fleet.set_drained(frozenset({ClusterId(fleet.remotes[0])}))


def leaving(fleet: Fleet) -> None:
    fleet.record_load(member_of(fleet, F), IDLE, leaving=True, asked_s=0.0, own=0)


def gone(fleet: Fleet) -> None:
    fleet.record_problem(member_of(fleet, F), "engine", Refused("http://f:1: refused"))


def other_name(fleet: Fleet) -> None:
    member_of(fleet, F).has_duplicate_name = True
    fleet.drain(F)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda fleet: None, "in_use"),
        (drained, "unused"),
        (leaving, "leaving"),
        (gone, "lost"),
        (other_name, "incompatible"),
    ],
)
async def test_states_of_a_node(change: Callable[[Fleet], None], state: NodeState) -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    change(fleet)
    found = {node.name: node.state for node in observe_nodes(fleet, clock.now())}
    assert found.pop("f") == state
    assert set(found.values()) == {"in_use"}
    states, _ = node_metrics(observe_nodes(fleet, clock.now()), 0)
    of_f = {s.labels["state"]: s.value for s in states.samples if s.labels["node"] == "f"}
    assert of_f == {name: float(name == state) for name in STATES}
