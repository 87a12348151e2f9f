"""Scenes of a running gateway, straight from its parts: `/prfaas/v1/state` has far more, and takes
far longer for two hundred nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from prfaas.clock import Clock
from prfaas.console.scene import (
    ClusterScene,
    HomeScene,
    LinkScene,
    NodeScene,
    NodeStatus,
    Scene,
    Verdict,
)
from prfaas.gateway.console.events import Moves
from prfaas.gateway.console.recent import Counts, HomeCounts
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.home_services import HomeServices
from prfaas.gateway.placement import home_of
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.router import Router
from prfaas.gateway.status import GatewayStatus
from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.service import Service
from prfaas.scheduler.state import LinkState
from prfaas.scheduler.view import LinkId, LinkView
from prfaas.types import ClusterId

_SHOWN_CHARS = 300  # of a member's problem
_NO_COUNTS = HomeCounts()


class SceneSource(Protocol):
    """What the console reads of a gateway, beside its requests."""

    def scene(self, at_s: float, counts: Counts) -> Scene: ...

    def moves(self) -> Mapping[str, Moves]:
        """The copies of prefixes, by their reason."""

    def describe(self, explanation: Explanation | None) -> dict[str, Any]:
        """The explanation of a route as JSON; None: no plan serves the request."""

    def explain_routes(self, wanted: Callable[[], bool]) -> None:
        """`wanted` says whether the route of the next request is to be explained."""


class GatewayScenes:
    """The `SceneSource` of a running gateway."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        status: GatewayStatus,
        copies: PrefixCopies,
        in_flight: Callable[[], int],
        clock: Clock,
        services: HomeServices,
        gateways: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`gateways`: describes the gateways of the deployment, where there are several."""
        self._fleet = fleet
        self._router = router
        self._status = status
        self._copies = copies
        self._in_flight = in_flight
        self._clock = clock
        self._services = services
        self._gateways = gateways
        self._shares: dict[ClusterId, tuple[Plan, float]] = {}

    def scene(self, at_s: float, counts: Counts) -> Scene:
        fleet, now_s = self._fleet, self._clock.now()
        services = self._services.all()
        nodes: dict[ClusterId, list[NodeScene]] = {c: [] for c in (*fleet.homes, *fleet.remotes)}
        for member in fleet.members:
            if member.cluster in nodes:
                nodes[member.cluster].append(self._node(member, now_s))
        return Scene(
            at_s=round(at_s, 3),
            model=str(fleet.members.formats.model or ""),
            policy=self._router.rules.policy,
            clusters=tuple(
                ClusterScene(
                    cluster,
                    "pd" if cluster in fleet.homes else "prfaas",
                    tuple(found),
                    cluster in fleet.drained,
                )
                for cluster, found in nodes.items()
            ),
            links=tuple(self._links(now_s)),
            homes=tuple(self._home(home, services[home], counts.homes) for home in fleet.homes),
            ttft=counts.ttft,
            in_flight=self._in_flight(),
            gateways=() if self._gateways is None else _gateway_lines(self._gateways()),
        )

    def moves(self) -> Mapping[str, Moves]:
        return {
            why: Moves(tally.made, tally.failed, tally.tokens, tally.nbytes)
            for why, tally in self._copies.tallies.items()
        }

    def describe(self, explanation: Explanation | None) -> dict[str, Any]:
        return self._status.describe_route(explanation)

    def explain_routes(self, wanted: Callable[[], bool]) -> None:
        self._router.wants_explanation = wanted

    def _node(self, member: Member, now_s: float) -> NodeScene:
        fleet, node = self._fleet, member.node
        used = idle = capacity = 0
        for pool in () if member.report is None else member.report.pools:
            used += pool.occupancy.used_pages * pool.page_bytes
            idle += pool.occupancy.idle_pages * pool.page_bytes
            # The pools of a kvd share its memory.
            capacity = max(capacity, (pool.occupancy.capacity_pages or 0) * pool.page_bytes)
        if node is None or node not in fleet.board or member.has_duplicate_name:
            return NodeScene(
                id=member.kvd_url,
                name=str(node or member.kvd_url),
                status="not in use",
                why=_shown(self._status.why_not_used(member, now_s)),
            )
        seen = fleet.board.node(node)
        why = None if seen.usable else self._status.why_not_used(member, now_s)
        wait_s = max(0.0, seen.free_at_s - now_s)
        return NodeScene(
            id=member.kvd_url,
            name=node,
            role=seen.role,
            becomes=self._status.next_role(node) if member.cluster in fleet.homes else None,
            status="in use" if seen.usable else self._out_of_use(member, now_s),
            why=_shown(why),
            # Of the prefills that were sent to the node, one runs.
            queued=max(0, seen.queued - 1),
            active=seen.active + (seen.queued > 0),
            slots=seen.slots if seen.role == "decode" else 0,
            wait_s=round(wait_s, 2) if math.isfinite(wait_s) else 0.0,
            used_bytes=used - idle,
            evictable_bytes=idle,
            capacity_bytes=capacity,
        )

    def _out_of_use(self, member: Member, now_s: float) -> NodeStatus:
        assert member.node is not None
        if member.leaving and member.is_expected_back(now_s):
            return "drains"
        if not member.is_alive(now_s):
            return "lost"
        return "drains" if self._fleet.roles.is_draining(member.node) else "not in use"

    def _links(self, now_s: float) -> Iterable[LinkScene]:
        for home in self._fleet.homes:
            states = self._router.states[home].links
            for link_id, link in self._fleet.board.view(now_s, {}, {}, home).links.items():
                yield _link(link_id, link, states.get(link_id) or LinkState())

    def _home(
        self, home: ClusterId, service: Service, counts: Mapping[str, HomeCounts]
    ) -> HomeScene:
        plan, state = self._router.plans.get(home), self._router.states[home]
        found = counts.get(home, _NO_COUNTS)
        # Requests that were refused before their home was known.
        unknown = counts.get("") if len(self._fleet.homes) == 1 else None
        return HomeScene(
            cluster=home,
            service=service.level,
            service_reason=_shown(service.reason) or "",
            has_plan=plan is not None,
            threshold_tokens=0.0
            if plan is None
            else round(plan.threshold_tokens * state.threshold_factor, 1),
            planned_threshold_tokens=0.0 if plan is None else plan.threshold_tokens,
            planned_rps=0.0 if plan is None else plan.capacity_rps,
            planned_share=0.0 if plan is None else self._planned_share(home, plan),
            plan_reason="" if plan is None else plan.reason,
            waiting=self._waiting(home),
            local=found.local,
            remote=found.remote,
            failed=found.failed + (0 if unknown is None else unknown.failed),
            prompt_tokens=found.prompt_tokens,
            cached_tokens=found.cached_tokens,
            stateless_tokens=found.stateless_tokens,
        )

    def _waiting(self, home: ClusterId) -> int:
        """Requests of the home that wait, whatever they wait for."""
        room = self._router.waiting_room
        return sum(
            room.count(cluster, queue)
            for cluster in (*self._fleet.homes, *self._fleet.remotes, None)
            for queue in room.tenants(cluster)
            if home_of(queue) == home
        )

    def _planned_share(self, home: ClusterId, plan: Plan) -> float:
        """The share of the requests that the plan offloads, computed once for each plan."""
        known = self._shares.get(home)
        if known is None or known[0] is not plan:
            known = self._shares[home] = (plan, round(plan.offloaded_share, 4))
        return known[1]


def _link(link_id: LinkId, link: LinkView, known: LinkState) -> LinkScene:
    stats = link.stats
    verdict: Verdict = "clear"
    if not link.up:
        verdict = "cut"
    elif known.health.verdict is LinkVerdict.CONGESTED:
        verdict = "congested"
    rtt_s = link.rtt_s if stats is None or stats.rtt_s is None else stats.rtt_s
    return LinkScene(
        source=link_id[0],
        target=link_id[1],
        verdict=verdict,
        cause=known.health.cause,
        capacity_bps=link.capacity_bps,
        # A link that is cut may report what it has delivered before.
        rate_bps=round(stats.goodput_bps, -3) if stats is not None and link.up else 0.0,
        backlog_bytes=0 if stats is None else stats.backlog_bytes,
        waited_s=0.0 if stats is None else round(stats.waited_s, 2),
        rtt_s=round(rtt_s, 4),
        lost_segments=0 if stats is None else stats.retransmitted_segments or 0,
    )


def _gateway_lines(state: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for each other gateway (`Federation.state`)."""
    lines = []
    for found in state.get("gateways", ()):
        if found["here"]:
            continue
        if found["alive"]:
            doing = "answers and makes the plans" if found["plans"] else "answers"
        else:
            doing = f"does not answer: {found['problem'] or 'it has not answered yet'}"
        lines.append(_shown(f"gateway {found['cluster']} {doing}") or "")
    return tuple(lines)


def _shown(text: str | None) -> str | None:
    if text is None or len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}..."
