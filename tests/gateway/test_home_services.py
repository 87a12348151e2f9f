"""What a gateway says of itself when sites are lost: readiness, state and metrics agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from prfaas.errors import Refused
from prfaas.gateway.dispatch.attempts import RetryBudget
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.home_services import HomeServices
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.router import Router
from prfaas.gateway.status import GatewayStatus
from prfaas.scheduler.homes.round_trips import round_trips
from prfaas.scheduler.service import SERVICE_LEVELS
from prfaas.scheduler.view import LinkId
from prfaas.types import ClusterId, LinkStats, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import PD, A, B, C, F, fall_silent, fleet_and_router, member_of
from tests.gateway.homes.regions import E0, E1, EAST, W0, W1, WEST, regions

FAR = ClusterId("far")
DECODES = {A: "decode", B: "decode", C: "decode"}


class Loop:
    history = PlanHistory(advises=False)
    plans_here = True


class Told(NamedTuple):
    unready: str
    levels: dict[str, str]  # of the metric, by home
    usable: dict[tuple[str, str], float]  # by home and PrfaaS cluster
    reasons: dict[str, str]  # of the state


def told(
    fleet: Fleet, router: Router, clock: FakeClock, helpers: Mapping[LinkId, float] | None = None
) -> Told:
    nothing: Any = None
    loop: Any = Loop()
    traffic: Any = type("Traffic", (), {"histories": {}})
    services = HomeServices(fleet, lambda: router.plans, clock, helpers or {})
    copies = PrefixCopies(fleet, nothing, nothing, clock)
    budget = RetryBudget(max_attempts=1)
    status = GatewayStatus(fleet, router, loop, budget, copies, clock, traffic, services)
    families = {family.name: family for family in status.metrics()}
    levels = families["prfaas_gateway_home_service"].samples
    usable = families["prfaas_gateway_prefill_cluster_usable"].samples
    (ready,) = families["prfaas_gateway_ready"].samples
    unready = status.unready_reason()
    assert ready.value == (not unready)
    assert {(s.labels["home"], s.labels["level"]) for s in levels} == {
        (home, level) for home in fleet.homes for level in SERVICE_LEVELS
    }
    shown = status.state(0)["homes"]
    found = {s.labels["home"]: s.labels["level"] for s in levels if s.value}
    assert found == {home["cluster"]: home["service"] for home in shown}, "they agree"
    return Told(
        unready,
        found,
        {(s.labels["home"], s.labels["cluster"]): s.value for s in usable},
        {home["cluster"]: home["reason"] for home in shown},
    )


def without_prefill_nodes(
    clock: FakeClock, capacity_rps: float | None = None
) -> tuple[Fleet, Router]:
    """The three PD nodes decode: the PrfaaS cluster prefills everything."""
    fleet, router = fleet_and_router(clock)
    plan = replace(router.plans[PD], roles=DECODES)  # type: ignore[arg-type]
    router.follow({PD: plan if capacity_rps is None else replace(plan, capacity_rps=capacity_rps)})
    fleet.assign_role(A, "decode")
    fleet.refresh()
    return fleet, router


def test_a_lost_remote_site_degrades_and_the_gateway_stays_ready() -> None:
    clock = FakeClock(10.0)
    fleet, router = without_prefill_nodes(clock)
    assert told(fleet, router, clock) == Told(
        "", {"pd": "served"}, {("pd", "far"): 1.0}, {"pd": ""}
    )
    fall_silent(fleet, clock, F)
    found = told(fleet, router, clock)
    assert (found.unready, found.levels) == ("", {"pd": "degraded"})
    assert found.usable == {("pd", "far"): 0.0}
    why = "no node of far prefills: its only node is lost, and pd has no prefill node in use"
    assert found.reasons["pd"] == f"{why}: decode nodes prefill for themselves"


def test_a_drained_remote_site_degrades_and_is_nobodys_fault() -> None:
    clock = FakeClock(10.0)
    fleet, router = without_prefill_nodes(clock)
    fleet.set_drained(frozenset({FAR}))
    found = told(fleet, router, clock)
    assert (found.unready, found.levels) == ("", {"pd": "degraded"})
    assert not found.usable, "no series: nothing is to be mended"
    assert found.reasons["pd"].startswith("the PrfaaS cluster far is drained, and pd has no")


def test_a_cut_link_degrades() -> None:
    clock = FakeClock(10.0)
    fleet, router = without_prefill_nodes(clock)
    cut = LinkStats("pd", 10.0, 0, goodput_bps=0.0, backlog_bytes=0, in_flight_bytes=0)
    fleet.board.record_link_report((FAR, PD), cut)
    found = told(fleet, router, clock)
    assert found.levels == {"pd": "degraded"} and found.usable == {("pd", "far"): 0.0}
    assert found.reasons["pd"].startswith("the link from far to pd is cut")


def test_with_local_prefill_nodes_the_loss_of_the_remote_site_shows_in_its_own_metric() -> None:
    clock = FakeClock(10.0)
    fleet, router = fleet_and_router(clock)
    fall_silent(fleet, clock, F)
    found = told(fleet, router, clock)
    assert found.levels == {"pd": "served"} and found.usable == {("pd", "far"): 0.0}


def test_without_a_pd_node_the_gateway_is_not_ready() -> None:
    clock = FakeClock(10.0)
    fleet, router = fleet_and_router(clock)
    lose(fleet, B, C)
    found = told(fleet, router, clock)
    assert (found.unready, found.levels) == ("", {"pd": "degraded"})
    why = "no node of pd decodes: 2 are lost, 1 prefills: prefill nodes decode as well"
    assert found.reasons["pd"] == why
    lose(fleet, A)
    found = told(fleet, router, clock)
    assert found.levels == {"pd": "unserved"}
    assert found.unready == "no node of pd is in use: all 3 are lost"


def test_a_drained_pd_cluster_is_not_served() -> None:
    clock = FakeClock(10.0)
    fleet, router = fleet_and_router(clock)
    fleet.set_drained(frozenset({PD}))
    assert told(fleet, router, clock).unready == "pd is drained"


def test_capacity_0_is_told_while_nodes_answer() -> None:
    clock = FakeClock(10.0)
    fleet, router = without_prefill_nodes(clock, capacity_rps=0.0)
    found = told(fleet, router, clock)
    assert (found.unready, found.levels) == ("", {"pd": "degraded"})
    assert found.reasons["pd"] == "the plan of pd has capacity 0"


# Several PD clusters -----------------------------------------------------------------------------


def lose(fleet: Fleet, *nodes: NodeId) -> None:
    for node in nodes:
        fleet.record_problem(member_of(fleet, node), "engine", Refused(f"http://{node}:1: refused"))


def test_a_gateway_is_ready_while_it_can_serve_one_of_its_homes() -> None:
    clock = FakeClock(10.0)
    made = regions(clock, decode_elsewhere=False)
    lose(made.fleet, E0, E1)
    found = told(made.fleet, made.router, clock)
    assert found.levels == {"east": "unserved", "west": "served"} and not found.unready
    assert found.reasons["east"] == "no node of east is in use: both are lost"
    lose(made.fleet, W0, W1)
    found = told(made.fleet, made.router, clock)
    assert set(found.levels.values()) == {"unserved"}
    assert found.unready == f"{found.reasons['east']}; {found.reasons['west']}"


def test_another_pd_cluster_that_decodes_keeps_a_home_served() -> None:
    clock = FakeClock(10.0)
    made = regions(clock)
    helpers = round_trips(made.deployment)
    lose(made.fleet, E0, E1)
    found = told(made.fleet, made.router, clock, helpers)
    assert found.levels == {"east": "degraded", "west": "served"}
    assert found.reasons["east"].endswith("both are lost: requests of east decode at west")
    lose(made.fleet, W0, W1)
    found = told(made.fleet, made.router, clock, helpers)
    assert found.levels == {"east": "unserved", "west": "unserved"}, "neither helps the other"
    assert EAST in found.unready and WEST in found.unready
