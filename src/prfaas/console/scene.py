"""What the console draws. One shape, whether it comes from a gateway, a simulation or a plan.

The browser gets these structs as JSON, with the field names below (`assets/store.js` reads them).
A scene has names that members chose: they are text, and the browser never parses them as markup.
Times named `at_s` are seconds on the clock of the page: since the epoch for a live gateway, since
the start of the run for a simulation.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from prfaas.scheduler.service import ServiceLevel

NodeStatus: TypeAlias = Literal["in use", "drains", "not in use", "lost"]
Verdict: TypeAlias = Literal["clear", "congested", "cut"]
EventKind: TypeAlias = Literal["plan", "role", "move", "link", "node", "cluster", "gateway"]


class NodeScene(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str  # one node of the scene; stays the same while its address does
    name: str
    role: str | None = None  # prefill or decode
    becomes: str | None = None  # the role that it drains for
    status: NodeStatus = "in use"
    why: str | None = None  # why it gets no requests
    queued: int = 0  # prefills that wait there
    active: int = 0  # requests that it prefills or decodes
    slots: int = 0  # decode slots; 0: not known
    wait_s: float = 0.0  # until it could begin another prefill
    used_bytes: int = 0  # KV memory in use, without what may be evicted
    evictable_bytes: int = 0
    capacity_bytes: int = 0


class ClusterScene(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    kind: Literal["pd", "prfaas"]
    nodes: tuple[NodeScene, ...] = ()
    drained: bool = False


class LinkScene(msgspec.Struct, frozen=True, omit_defaults=True):
    source: str  # clusters
    target: str
    verdict: Verdict = "clear"
    cause: str = ""
    capacity_bps: float = 0.0
    rate_bps: float = 0.0  # bytes that arrive
    backlog_bytes: int = 0  # not yet arrived
    waited_s: float = 0.0  # of the oldest of these
    rtt_s: float = 0.0
    lost_segments: int = 0  # sent again, in the latest report


class HomeScene(msgspec.Struct, frozen=True, omit_defaults=True):
    """One PD cluster: its plan, and the requests that arrive there. Counts are since the start."""

    cluster: str
    has_plan: bool = False
    threshold_tokens: float = 0.0  # in force: the plan's, times the factor of the short-term loop
    planned_threshold_tokens: float = 0.0
    planned_rps: float = 0.0
    planned_share: float = 0.0  # of the requests that the plan offloads
    plan_reason: str = ""
    waiting: int = 0
    local: int = 0  # finished requests, by route
    remote: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # Tokens whose blocks are cached somewhere, but without the recurrent state to resume from.
    stateless_tokens: int = 0
    service: ServiceLevel = "served"
    service_reason: str = ""  # why it is not better


class TtftParts(msgspec.Struct, frozen=True):
    """Sums over the first tokens since the start; a difference of two scenes is an interval."""

    first_tokens: int = 0
    wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0


class EventScene(msgspec.Struct, frozen=True):
    """Something that happened once: a plan, a change of a role, a move, a cut link."""

    id: int  # rises
    at_s: float
    kind: EventKind
    text: str  # one sentence
    where: str = ""  # a node, a cluster, or "source -> target"


class RequestScene(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request that has ended, or that has its first token."""

    id: str
    at_s: float  # its arrival
    home: str
    route: str  # local, remote, alone, none
    outcome: str
    reason: str = ""
    prefill: str = ""  # nodes, by name
    decode: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    nbytes: int = 0
    attempts: int = 1
    ttft_s: float | None = None
    wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


class Scene(msgspec.Struct, frozen=True, omit_defaults=True):
    at_s: float
    model: str
    policy: str
    clusters: tuple[ClusterScene, ...]
    links: tuple[LinkScene, ...]
    homes: tuple[HomeScene, ...]
    ttft: TtftParts = TtftParts()
    in_flight: int = 0
    gateways: tuple[str, ...] = ()  # other gateways, with what is known of them: one line each
