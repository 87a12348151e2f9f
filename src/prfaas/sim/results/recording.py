"""What a run looked like: the state of nodes and links at some hundred moments, and every route.

`SimConfig.moments` asks for it. A recording observes the run and changes nothing in it. Its memory
is bounded: when it is full, it drops half of the moments and takes them half as often.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.lookup.prefixes import CachedPrefixes
from prfaas.scheduler.plan import Role
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.state import LinkState
from prfaas.scheduler.view import LinkId
from prfaas.types import ClusterId, LinkStats, NodeId

if TYPE_CHECKING:
    from prfaas.sim.nodes import SimNode
    from prfaas.sim.world import World

RouteKind: TypeAlias = Literal["none", "local", "remote", "alone"]
ROUTE_KINDS: tuple[RouteKind, ...] = ("none", "local", "remote", "alone")

MOST_EXPLAINED = 2_000  # requests
_LEAST_MOMENTS = 6

# A run lasts longer than its arrivals. With fewer moments than allowed while requests arrive, most
# runs end before the recording is full.
_SHARE_OF_ARRIVALS = 0.8


class RecordedNode(NamedTuple):
    name: NodeId
    cluster: ClusterId
    slots: int  # for decode; 0: the node never decodes


class RecordedLink(NamedTuple):
    link: LinkId
    bps: float  # as configured
    rtt_s: float


class NodeMoment(NamedTuple):
    role: Role
    planned: Role  # differs from `role` while the node drains or changes
    alive: bool
    switching: bool  # drained, and changing its role
    active: int  # requests that it prefills or decodes
    queued: int  # requests that wait there: for a prefill, for a decode slot, for memory


class LinkMoment(NamedTuple):
    bps: float  # 0: the link is cut
    carried_bits: float  # since the start of the run
    backlog_bytes: int
    waited_s: float  # of the oldest byte of the backlog
    state: LinkState | None  # as the router judges the link; None: not judged yet


class Moment(NamedTuple):
    at_s: float
    nodes: tuple[NodeMoment, ...]  # as `Recording.nodes`
    links: tuple[LinkMoment, ...]  # as `Recording.links`
    threshold_factors: tuple[float, ...]  # of the short-term loop, one per PD cluster


class RoleChange(NamedTuple):
    at_s: float
    node: NodeId
    role: Role  # the new one


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Columns, one row per arrival: its last attempt. Nodes are numbers in `Recording.nodes`, -1
    where the request was not dispatched."""

    kind: Sequence[int]  # number in ROUTE_KINDS
    prefill: Sequence[int]
    decode: Sequence[int]
    nbytes: Sequence[int]  # of the hand-off, as the router expected it
    reason: Sequence[int]  # number in `reasons`
    # Tokens whose blocks a node has, but without the recurrent state to resume from.
    stateless_tokens: Sequence[int]
    reasons: tuple[str, ...]
    # What the router compared for some of the requests, evenly spaced, by their row.
    explanations: Mapping[int, Explanation]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    nodes: tuple[RecordedNode, ...]
    links: tuple[RecordedLink, ...]
    moments: Sequence[Moment]  # the first at 0 s, the last at the end of the run
    role_changes: Sequence[RoleChange]
    routes: Routes


class Recorder:
    def __init__(self, world: World, arrivals: int, last_arrival_s: float) -> None:
        self._world = world
        self._most = max(world.config.moments, _LEAST_MOMENTS)
        self._every_s = last_arrival_s / (_SHARE_OF_ARRIVALS * self._most)
        self._due_s = 0.0
        self._numbers = {name: number for number, name in enumerate(world.nodes)}
        self._moments: list[Moment] = []
        self._role_changes: list[RoleChange] = []
        self._explain_every = -(-arrivals // MOST_EXPLAINED)
        self._explanations: dict[int, Explanation] = {}
        self._reasons = {"": 0}
        self._kind = bytearray(arrivals)
        self._prefill = array("i", [-1]) * arrivals
        self._decode = array("i", [-1]) * arrivals
        self._reason = array("i", [0]) * arrivals
        self._nbytes = array("q", [0]) * arrivals
        self._stateless = array("q", [0]) * arrivals

    def record_dispatch(
        self, request: Request, home: ClusterId, cached: CachedPrefixes, route: Route
    ) -> None:
        """Before the board has the dispatch."""
        index, world = request.id, self._world
        if index % self._explain_every == 0:
            self._explanations[index] = world.homes.explain(
                request, home, world.board, cached, world.waiting_room, world.events.now_s, route
            )
        kind: RouteKind = "remote" if route.offloaded else "local"
        self._kind[index] = ROUTE_KINDS.index("alone" if route.alone else kind)
        self._prefill[index] = self._numbers[route.prefill]
        self._decode[index] = self._numbers[route.decode]
        self._nbytes[index] = route.nbytes
        self._reason[index] = self._reasons.setdefault(route.reason, len(self._reasons))
        blocks = max((held.prefix.attention_tokens for held in cached.groups), default=0)
        resumable = max((held.prefix.tokens for held in cached.groups), default=0)
        self._stateless[index] = max(0, blocks - resumable)

    def record_role(self, node: SimNode) -> None:
        self._role_changes.append(RoleChange(self._world.events.now_s, node.name, node.role))

    def take(self, reports: Mapping[LinkId, LinkStats], *, at_once: bool = False) -> None:
        """Records the present moment, if one is due. `reports`: of the links, as of now."""
        now = self._world.events.now_s
        if now < self._due_s and not at_once:
            return
        if len(self._moments) >= self._most - 1:  # there is always room for the last moment
            self._moments = thinned(self._moments, self._most // 2)
            self._every_s *= 2
        self._moments.append(self._moment(now, reports))
        self._due_s = now + self._every_s

    def finish(self) -> Recording:
        """Records the last moment. The links must be settled."""
        world = self._world
        if self._moments and self._moments[-1].at_s >= world.events.now_s:
            self._moments.pop()
        self._moments.append(self._moment(world.events.now_s, link_reports(world)))
        return Recording(
            nodes=tuple(
                RecordedNode(node.name, node.cluster, world.slots.get(node.cluster, 0))
                for node in world.nodes.values()
            ),
            links=tuple(
                RecordedLink(link, path.bps, path.rtt_s) for link, path in world.paths.items()
            ),
            moments=self._moments,
            role_changes=self._role_changes,
            routes=Routes(
                kind=self._kind,
                prefill=self._prefill,
                decode=self._decode,
                nbytes=self._nbytes,
                reason=self._reason,
                stateless_tokens=self._stateless,
                reasons=tuple(self._reasons),
                explanations=self._explanations,
            ),
        )

    def _moment(self, now_s: float, reports: Mapping[LinkId, LinkStats]) -> Moment:
        world = self._world
        homes = world.homes
        return Moment(
            at_s=now_s,
            nodes=tuple(self._node(node) for node in world.nodes.values()),
            links=tuple(
                LinkMoment(
                    link.bps,
                    link.total_bits,
                    reports[link_id].backlog_bytes,
                    reports[link_id].waited_s,
                    homes.link_state(link_id),
                )
                for link_id, link in world.links.items()
            ),
            threshold_factors=tuple(homes.threshold_factor(name) for name in homes.names),
        )

    def _node(self, node: SimNode) -> NodeMoment:
        plan = self._world.homes.plans.get(node.cluster)
        return NodeMoment(
            role=node.role,
            planned=node.role if plan is None else plan.roles.get(node.name, node.role),
            alive=node.alive,
            switching=node.switching,
            active=node.batch.running + (node.running is not None),
            queued=len(node.queue) + len(node.for_slot) + len(node.for_memory),
        )


def thinned(moments: Sequence[Moment], most: int) -> list[Moment]:
    """At most so many of the moments, evenly chosen, with the first and the last one. A moment at
    which no node works begins an idle stretch without moments: such ones are kept, so that no
    stretch looks busy that is idle."""
    if len(moments) <= most:
        return list(moments)
    idle = [
        index
        for index, moment in enumerate(moments)
        if not any(node.active or node.queued for node in moment.nodes)
    ]
    if len(idle) > most // 2 - 1:
        idle = []
    even = np.linspace(0, len(moments) - 1, most - len(idle)).round().astype(int)
    return [moments[index] for index in sorted({*even.tolist(), *idle})]


def link_reports(world: World) -> dict[LinkId, LinkStats]:
    return {
        link_id: link.report(link_id[1], world.paths[link_id].rtt_s)
        for link_id, link in world.links.items()
    }
