"""Scenes of a fleet whose nodes have answered; no process and no socket."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prfaas.console.scene import NodeScene, Scene, TtftParts
from prfaas.gateway.console.recent import Counts, HomeCounts
from prfaas.gateway.console.scenes import GatewayScenes
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.home_services import HomeServices
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.router import Router
from prfaas.gateway.status import GatewayStatus
from prfaas.types import ClusterId, HashEvent
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.console.made_scenes import HOSTILE
from tests.gateway.fleets import (
    LONG,
    PD,
    SHORT,
    A,
    B,
    C,
    F,
    fall_silent,
    fleet_and_router,
    member_of,
    placement,
)
from tests.gateway.reports import report

NO_COUNTS = Counts({}, TtftParts())


class Loop:
    history = PlanHistory(advises=False)


def made(clock: FakeClock, **options: Any) -> tuple[Fleet, Router, GatewayScenes]:
    nothing: Any = None
    loop: Any = Loop()
    fleet, router = fleet_and_router(clock, **options)
    copies = PrefixCopies(fleet, nothing, nothing, clock)
    traffic: Any = type("Traffic", (), {"histories": {}})
    services = HomeServices(fleet, lambda: router.plans, clock)
    status = GatewayStatus(fleet, router, loop, nothing, copies, clock, traffic, services)
    return fleet, router, GatewayScenes(fleet, router, status, copies, lambda: 7, clock, services)


def nodes(scene: Scene) -> dict[str, NodeScene]:
    return {node.name: node for cluster in scene.clusters for node in cluster.nodes}


def test_a_scene_has_clusters_nodes_links_and_plans() -> None:
    clock = FakeClock(10.0)
    _, router, scenes = made(clock)
    counts = Counts({"pd": HomeCounts(1, 2, 3, 4, 5, 6)}, TtftParts(1, 2.0, 3.0, 4.0, 5.0))
    scene = scenes.scene(1e9, counts)
    assert (scene.at_s, scene.policy, scene.in_flight) == (1e9, "paper", 7)
    assert [(c.name, c.kind, c.drained) for c in scene.clusters] == [
        ("pd", "pd", False),
        ("far", "prfaas", False),
    ]
    found = nodes(scene)
    assert {name: node.role for name, node in found.items()} == {
        **{"a": "prefill", "b": "decode", "c": "decode", "f": "prefill"}
    }
    assert {node.status for node in found.values()} == {"in use"}
    assert found["b"].slots > 0 and found["a"].slots == 0 and found["a"].capacity_bytes > 0
    (link,) = scene.links
    assert (link.source, link.target, link.verdict) == ("far", "pd", "clear")
    (home,) = scene.homes
    plan = router.plans[PD]
    assert home.has_plan and home.planned_threshold_tokens == plan.threshold_tokens
    assert home.planned_share == round(plan.offloaded_share, 4) and 0 < home.planned_share < 1
    assert (home.local, home.remote, home.failed, home.stateless_tokens) == (1, 2, 3, 6)
    assert scene.ttft == counts.ttft
    assert msgspec.json.decode(msgspec.json.encode(scene), type=Scene) == scene


async def test_work_is_shown_where_it_is() -> None:
    clock = FakeClock(10.0)
    _, router, scenes = made(clock)
    for seed in range(3):
        await router.place(placement(LONG, clock, seed=seed), 1.0)
    found = nodes(scenes.scene(0.0, NO_COUNTS))
    assert (found["f"].active, found["f"].queued) == (1, 2) and found["f"].wait_s > 0
    assert found["b"].active + found["c"].active == 3


def test_a_silent_node_is_lost_and_a_drained_cluster_is_out_of_use() -> None:
    clock = FakeClock(10.0)
    fleet, _, scenes = made(clock)
    fall_silent(fleet, clock, F)
    lost = nodes(scenes.scene(0.0, NO_COUNTS))["f"]
    assert lost.status == "lost" and lost.why is not None and "does not answer" in lost.why
    fleet.set_drained(frozenset({ClusterId("pd")}))
    scene = scenes.scene(0.0, NO_COUNTS)
    assert scene.clusters[0].drained
    assert nodes(scene)["b"].status == "not in use"
    assert nodes(scene)["b"].why == "the cluster pd is drained"


def test_a_home_is_shown_with_how_it_is_served() -> None:
    clock = FakeClock(10.0)
    fleet, _, scenes = made(clock)
    (home,) = scenes.scene(0.0, NO_COUNTS).homes
    assert (home.service, home.service_reason) == ("served", "")
    fall_silent(fleet, clock, A, B, C)
    (home,) = scenes.scene(0.0, NO_COUNTS).homes
    assert home.service == "unserved"
    assert home.service_reason == "no node of pd is in use: all 3 are lost"


def test_a_node_that_changes_its_role_drains() -> None:
    clock = FakeClock(10.0)
    fleet, _, scenes = made(clock)
    b = member_of(fleet, nodes(scenes.scene(0.0, NO_COUNTS))["b"].name)  # type: ignore[arg-type]
    assert b.node is not None
    fleet.drain(b.node)
    found = nodes(scenes.scene(0.0, NO_COUNTS))["b"]
    assert found.status == "drains" and found.why is not None


def test_a_member_that_has_not_answered_is_shown_by_its_address() -> None:
    clock = FakeClock(10.0)
    fleet, _, scenes = made(clock)
    fleet.register("http://new:2", PD)
    new = nodes(scenes.scene(0.0, NO_COUNTS))["http://new:2"]
    assert new.id == "http://new:2" and new.status == "not in use" and new.role is None


def test_names_of_members_are_text() -> None:
    """They leave the gateway as JSON strings only."""
    clock = FakeClock(10.0)
    fleet, _, scenes = made(clock)
    fleet.register("http://new:2", PD)
    member = next(m for m in fleet.members if m.kvd_url == "http://new:2")
    fleet.record_report(member, report(HOSTILE))
    scene = scenes.scene(0.0, NO_COUNTS)
    assert HOSTILE in nodes(scene)
    again = msgspec.json.decode(msgspec.json.encode(scene))
    assert HOSTILE in [node["name"] for node in again["clusters"][0]["nodes"]]


def test_requests_that_were_refused_before_their_home_was_known_count_for_the_only_home() -> None:
    _, _, scenes = made(FakeClock(10.0))
    scene = scenes.scene(0.0, Counts({"": HomeCounts(failed=2)}, TtftParts()))
    assert scene.homes[0].failed == 2


async def test_routes_are_explained_when_a_console_wants_it() -> None:
    clock = FakeClock(10.0)
    _, router, scenes = made(clock)
    unseen = placement(LONG, clock)
    await router.place(unseen, 1.0)
    assert unseen.explanation is None
    answers = iter([True, False])
    scenes.explain_routes(lambda: next(answers))
    seen, unwanted = placement(LONG, clock, seed=1), placement(SHORT, clock, seed=2)
    await router.place(seen, 1.0)
    await router.place(unwanted, 1.0)
    assert unwanted.explanation is None and seen.explanation is not None
    assert seen.booking is not None
    found = scenes.describe(seen.explanation)
    assert found["chosen"]["prefill"] == seen.booking.route.prefill == "f"
    alone = [option["alone"] for option in found["alternatives"]]
    assert {option["node"] for option in found["alternatives"]} >= {"a", "f"} and sum(alone) == 1
    msgspec.json.encode(found)
    asked = placement(SHORT, clock, seed=3)
    asked.explains = True
    await router.place(asked, 1.0)
    assert asked.explanation is not None, "whatever the rate"


async def test_a_failing_explanation_does_not_fail_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(10.0)
    fleet, router, scenes = made(clock)
    scenes.explain_routes(lambda: True)

    def fail(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(router._decisions, "explain_choice", fail)
    wanted = placement(LONG, clock)
    await router.place(wanted, 1.0)
    assert wanted.booking is not None and wanted.explanation is None
    assert fleet.failures.counts["console"] == 1


async def test_blocks_without_a_state_are_counted() -> None:
    """A node has the attention blocks of a prefix, and no recurrent state to resume from."""
    clock = FakeClock(10.0)
    fleet, router, scenes = made(clock)
    wanted = placement(LONG, clock)
    assert fleet.prefixes.add(member_of(fleet, F), F)
    hashes = tuple(wanted.prompt.at(64)[:4])
    assert fleet.manager.apply(HashEvent(0, F, "full", 64, hashes, "stored"))
    scenes.explain_routes(lambda: False)
    await router.place(wanted, 1.0)
    assert wanted.stateless_tokens == 4 * 64 and wanted.explanation is None
