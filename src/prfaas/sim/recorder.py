"""Records what a run looks like: nodes and links at some hundred moments, and every route.

It observes the run and changes nothing in it. Its memory is bounded: when it is full, it drops half
of the moments and takes them half as often.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.lookup.prefixes import CachedPrefixes
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.view import LinkId
from prfaas.sim.nodes import SimNode
from prfaas.sim.results.recording import (
    ROUTE_KINDS,
    LinkMoment,
    Moment,
    NodeMoment,
    RecordedLink,
    RecordedNode,
    Recording,
    RoleChange,
    RouteKind,
    Routes,
    thinned,
)
from prfaas.sim.world import World
from prfaas.types import ClusterId, LinkStats

MOST_EXPLAINED = 2_000  # requests
_LEAST_MOMENTS = 6

# A run lasts longer than its arrivals. With fewer moments than allowed while requests arrive, most
# runs end before the recording is full.
_SHARE_OF_ARRIVALS = 0.8


class Recorder:
    """The world calls it with what happens. It calls nothing of the world that changes anything."""

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
        self._moments.append(self._moment(world.events.now_s, world.link_reports()))
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
