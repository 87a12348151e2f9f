"""What a run looked like: the state of nodes and links at some hundred moments, and every route.

`SimConfig.moments` asks for it, and `sim.recorder` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.plan import Role
from prfaas.scheduler.state import LinkState
from prfaas.scheduler.view import LinkId
from prfaas.types import ClusterId, NodeId

RouteKind: TypeAlias = Literal["none", "local", "remote", "alone"]
ROUTE_KINDS: tuple[RouteKind, ...] = ("none", "local", "remote", "alone")


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
