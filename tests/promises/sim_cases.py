"""Runs a drawn case through the simulator, and keeps what the rules need to know about the run.

The router, its board, its plans and its waiting room are those of the product. `Watched` is the
simulated world with notes of what happens in it; it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from prfaas.config.deployment import SchedulerSection
from prfaas.estimator.uncertainty import EstimateError
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.problem import Local, Path, Pool, Problem, Remote
from prfaas.planner.profile import DecodeRate, PrefillProfile
from prfaas.planner.workload import Workload
from prfaas.scheduler.request import Route
from prfaas.scheduler.view import LinkId
from prfaas.scheduler.waiting import Hold
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.attempt import Attempt
from prfaas.sim.config import (
    CacheConfig,
    ClusterFault,
    DrainFault,
    Fault,
    LinkFault,
    NodeFault,
    RateChange,
    SimConfig,
    SlowFault,
)
from prfaas.sim.nodes import SimNode
from prfaas.sim.results.result import Requests
from prfaas.sim.run import run
from prfaas.sim.world import World
from prfaas.types import BlockHash, ClusterId, NodeId
from tests.planner.builders import profile
from tests.promises.cases import PROMPT_TOKENS, Case, DeploymentCase, EventCase, HomeTraffic

SPEC = KVSpec((FullAttention("full0", (0,), 4_000), LinearState("linear0", (1,), 50_000)))
FAR, NEAR = (
    profile((64, 0.02), (1000, 0.15), (8000, 1.6)),
    profile((64, 0.05), (1000, 0.45), (8000, 5.0)),
)
FABRIC = Path(1e10, 0.0)
DECODE = DecodeRate(8, 0.02)
OUTPUT_TOKENS = 30
BLOCK_TOKENS = 64
SECONDS = 60.0  # of traffic, unless that is too few or too many requests
REQUESTS = (60, 160)
# No request ends for so long only where none can. The longest prefill takes 100 s, and what may be
# on its way over a link when that becomes 50 times thinner takes half an hour.
HOPELESS_S = 3_600.0
FULL_LINK_S = 5.0  # what waits for a link that needs longer for what it has waits at the router
LIKE = 1.5  # a node is as fast as another one that needs no less than this part of its time
_ERROR = EstimateError("estimated", (("prefill", 0.5),), 0.2)


class Dispatched(NamedTuple):
    at_s: float
    index: int  # of the request
    route: Route


class Landed(NamedTuple):
    """KV of a prefill is in place, and its decode may begin."""

    at_s: float
    index: int
    route: Route
    began_s: float  # of the prefill


class IdleNode(NamedTuple):
    """A node did nothing, while a request waited for its cluster, or for any node."""

    node: NodeId
    from_s: float
    until_s: float
    cluster: ClusterId | None  # that the request waited for


@dataclass
class Run:
    """What a case did."""

    case: Case
    config: SimConfig
    requests: Requests
    seconds: float  # of the traffic
    dispatched: list[Dispatched] = field(default_factory=list)
    landed: list[Landed] = field(default_factory=list)
    idle: list[IdleNode] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)  # what the books still have at the end


class Watched(World):
    """The simulated world, watched."""

    def __init__(self, problem: NetworkProblem, arrivals: Arrivals, config: SimConfig) -> None:
        super().__init__(problem, arrivals, config)
        self.dispatched: list[Dispatched] = []
        self.landed: list[Landed] = []
        self.idle: list[IdleNode] = []
        self._idle_since: dict[tuple[NodeId, ClusterId | None], float] = {}
        self._routes: list[Route] = []
        self._held_for: dict[int, ClusterId | None] = {}  # requests that wait
        self._left_s: dict[
            ClusterId | None, float
        ] = {}  # when a request began to wait for another one
        self._retried_s = 0.0
        board_dispatch = self.board.record_dispatch

        def record_dispatch(route: Route, kv_bytes: float, now_s: float) -> object:
            self._routes.append(route)
            return board_dispatch(route, kv_bytes, now_s)

        self.board.record_dispatch = record_dispatch  # type: ignore

    def _try_dispatch(self, index: int) -> Hold | None:
        held = super()._try_dispatch(index)
        now, waited = self.events.now_s, index in self._held_for
        before = self._held_for.pop(index, None)
        if held is None:
            self.dispatched.append(Dispatched(now, index, self._routes[-1]))
            return held
        self._held_for[index] = held.cluster
        if waited and before != held.cluster:
            self._left_s[before] = now
        return held

    def _on_handoff(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            began_s = attempt.started_s
            now = self.events.now_s
            self.landed.append(Landed(now, attempt.index, attempt.route, began_s))
        super()._on_handoff(attempt)

    def try_route(self, index: int) -> None:
        super().try_route(index)
        self._note_idle()

    def retry_waiting(self) -> None:
        self._retried_s = self.events.now_s
        super().retry_waiting()
        self._note_idle()

    def _note_idle(self) -> None:
        """Notes the nodes that do nothing after every request that waits has been retried."""
        now = self.events.now_s
        idle = self._idle_now() if self.waiting_room else set()
        for key in [key for key in self._idle_since if key not in idle]:
            self._keep(key, now)
        for key in idle:
            self._idle_since.setdefault(key, now)

    def _keep(self, key: tuple[NodeId, ClusterId | None], until_s: float) -> None:
        node, cluster = key
        self.idle.append(IdleNode(node, self._idle_since.pop(key), until_s, cluster))

    def _idle_now(self) -> set[tuple[NodeId, ClusterId | None]]:
        """The idle nodes that a request waits for: any node that decodes, or one of a cluster that
        is believed to be as fast as the others there and that the request's home can use."""
        found: set[tuple[NodeId, ClusterId | None]] = set()
        for cluster in self.waiting_room.queues():
            homes = [ClusterId(name) for name in self.waiting_room.tenants(cluster)]
            if self._left_s.get(cluster, -1.0) >= self._retried_s:
                continue  # those that wait change to another cluster, a few at each retry
            if cluster is None:
                reached = {one for home in homes for one in self._decoding_for(home)}
                nodes = [node for node in self.nodes.values() if node.cluster in reached]
            elif all(self._is_cut_off(cluster, home) for home in homes):
                continue
            else:
                nodes = self._fastest(cluster)
            found |= {(node.name, cluster) for node in nodes if is_idle(node)}
        return found

    def _decoding_for(self, home: ClusterId) -> list[ClusterId]:
        """The PD clusters where the requests of a home may decode."""
        return [home, *(to for at, to in self.config.round_trips if at == home)]

    def _fastest(self, cluster: ClusterId) -> list[SimNode]:
        nodes = [
            node
            for node in self.nodes.values()
            if node.cluster == cluster and node.role == "prefill" and is_usable(node)
        ]
        paces = {node.name: self.board.node(node.name).pace for node in nodes}
        least = min(paces.values(), default=0.0)
        return [node for node in nodes if paces[node.name] <= LIKE * least]

    def _is_cut_off(self, cluster: ClusterId, home: ClusterId) -> bool:
        """Whether a link from a cluster is full, as far as the router knows, over which a request
        of the home would come back. Where no node decodes there, it decodes elsewhere."""
        decoding = {n.cluster for n in self.nodes.values() if is_usable(n) and n.role == "decode"}
        targets = [home] if home in decoding else self._decoding_for(home)[1:]
        ways = [one for one in targets if one in decoding]
        return not ways or any(self._has_full_link(cluster, one) for one in ways)

    def _has_full_link(self, cluster: ClusterId, home: ClusterId) -> bool:
        link_id = cluster, home
        view, known = self.board.link(link_id), self.homes.link_state(link_id)
        if view is None:
            return cluster != home  # there is no way
        believed_bps = view.capacity_bps if known is None or known.bps is None else known.bps
        bps = min(self.links[link_id].bps, believed_bps)
        return view.pending_bytes * 8 > FULL_LINK_S * bps

    def end(self) -> list[str]:
        """Closes the notes. Returns what is left of requests that have ended."""
        for key in list(self._idle_since):
            self._keep(key, self.events.now_s)
        self.waiting_room.check()
        if self.caches is not None:
            self.caches.check()
        unserved = len(self.waiting_room)
        found = [] if self.in_flight == unserved else [f"{self.in_flight} requests in flight"]
        for name, node in self.nodes.items():
            own, left = self.board.own_sequences(name), self.board.own_prefills(name, self.now_s)
            view = self.board.node(name)
            booked = (own.active, own.decoding, left.prefills, view.queued)
            if any(booked) or node.prefills or node.decodes:
                found.append(f"{name}: active, decoding, prefills, queued {booked}")
            if view.free_kv_bytes != node.free_kv_bytes:
                found.append(f"{name}: decode memory")
        for link_id in self.links:
            view_of_link = self.board.link(link_id)
            pending = 0 if view_of_link is None else view_of_link.pending_bytes
            if pending:
                found.append(f"{link_id}: {pending} bytes pending")
        return found

    @property
    def now_s(self) -> float:
        return self.events.now_s


def is_usable(node: SimNode) -> bool:
    return node.alive and node.in_use and not node.switching


def is_idle(node: SimNode) -> bool:
    """Whether a usable node does nothing, and will not with what it has."""
    if not is_usable(node):
        return False
    if node.role == "decode" and (node.batch.running or node.decodes):
        return False
    return all(attempt.prefilled_s for attempt in node.prefills)


def run_case(case: Case) -> Run:
    arrivals, seconds = arrivals_of(case)
    config = config_of(case, seconds)
    world = Watched(network_of(case), arrivals, config)
    result = run(world, arrivals, hopeless_s=HOPELESS_S)
    left = world.end()
    return Run(
        case, config, result.requests, seconds, world.dispatched, world.landed, world.idle, left
    )


# The simulator's problem --------------------------------------------------------------------------


def network_of(case: Case) -> NetworkProblem:
    deployment = case.deployment
    homes = [Home(1 / len(case.traffic), _problem(deployment, traffic)) for traffic in case.traffic]
    return NetworkProblem(tuple(homes))


def _problem(deployment: DeploymentCase, traffic: HomeTraffic) -> Problem:
    home = deployment.cluster(traffic.home)
    paths = {
        (link.source, link.target): Path(link.gbps * 1e9, link.rtt_ms / 1e3)
        for link in deployment.links
    }
    remotes = tuple(
        Remote(
            _pool(deployment, far.name, len(far.nodes), FAR),
            paths[far.name, home.name],
            back=paths.get((home.name, far.name)),
        )
        for far in deployment.prfaas
        if (far.name, home.name) in paths
    )
    pool = _pool(deployment, home.name, len(home.nodes), NEAR)
    return Problem(
        spec=SPEC,
        workload=_workload(traffic),
        remotes=remotes,
        local=Local(pool, DECODE, FABRIC, fixed_prefill=home.stated_prefill),
    )


def _pool(deployment: DeploymentCase, name: str, count: int, times: PrefillProfile) -> Pool:
    return Pool(name, name, count, 1, times, 1.0, None if deployment.measured else _ERROR)


def _workload(traffic: HomeTraffic) -> Workload:
    shortest, longest = PROMPT_TOKENS[traffic.lengths]
    new = np.unique(np.round(np.geomspace(shortest, longest, 40)))
    return Workload(new, np.zeros(len(new)), np.full(len(new), 1 / len(new)), OUTPUT_TOKENS)


def carried_rps(case: Case, traffic: HomeTraffic) -> float:
    """About the rate that a home can carry by its profiles, with its part of the PrfaaS nodes."""
    deployment = case.deployment
    home, tokens = deployment.cluster(traffic.home), _workload(traffic).new
    # Without a prefill node, the others serve alone.
    near = home.present[: home.prefill] or home.present or home.nodes
    rate = len(near) / float(NEAR.seconds(tokens).mean())
    for far in deployment.prfaas if case.policy != "local" else ():
        reached = [link.target for link in deployment.links if link.source == far.name]
        if home.name in reached:
            rate += len(far.present) / len(reached) / float(FAR.seconds(tokens).mean())
    return rate


def arrivals_of(case: Case) -> tuple[Arrivals, float]:
    """The requests of every home, and the seconds in which they arrive."""
    rates = {one.home: one.rate * carried_rps(case, one) for one in case.traffic}
    total = sum(rates.values())
    seconds = min(max(SECONDS * total, REQUESTS[0]), REQUESTS[1]) / total
    parts = []
    for number, traffic in enumerate(case.traffic):
        rng = np.random.default_rng([case.seed, number])
        floods = [e for e in case.events if e.kind == "flood" and e.what == traffic.home]
        at_s = _times(rates[traffic.home], seconds, floods, rng)
        parts.append((number, at_s, *prompts(traffic, len(at_s), rng)))
    at_s = np.concatenate([part[1] for part in parts])
    order = np.argsort(at_s, kind="stable")
    tokens = np.concatenate([part[2] for part in parts])
    hashes = [names for part in parts for names in part[3]]
    homes = np.concatenate([np.full(len(part[1]), part[0]) for part in parts])
    arrivals = Arrivals(
        at_s=at_s[order],
        prompt_tokens=tokens[order],
        cached_tokens=np.zeros(len(order), dtype=np.int64),
        output_tokens=np.full(len(order), OUTPUT_TOKENS),
        hashes=[hashes[index] for index in order] if _reuses(case) else None,
        homes=homes[order],
    )
    return arrivals, seconds


def _times(
    rate: float, seconds: float, floods: list[EventCase], rng: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Poisson arrivals; in a flood more of them. At least one, which is at the end if need be."""
    pieces = [rng.uniform(0, seconds, rng.poisson(rate * seconds))]
    for flood in floods:
        begin, end = flood.at, min(1.0, flood.until or 1.0)
        more = rng.poisson((flood.factor - 1) * rate * max(0.0, end - begin) * seconds)
        pieces.append(rng.uniform(begin * seconds, end * seconds, more))
    at_s = np.sort(np.concatenate(pieces))
    return at_s if len(at_s) else np.array([seconds])


def prompts(
    traffic: HomeTraffic, count: int, rng: np.random.Generator
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], list[tuple[BlockHash, ...]]]:
    """Lengths, and hashes of whole blocks. A prompt that continues an earlier one begins with as
    many of its blocks as it has room for."""
    shortest, longest = PROMPT_TOKENS[traffic.lengths]
    logs = rng.uniform(np.log(shortest), np.log(longest), count)
    tokens = np.exp(logs).astype(np.int64)
    hashes: list[tuple[BlockHash, ...]] = []
    for index, length in enumerate(tokens.tolist()):
        blocks = length // BLOCK_TOKENS
        begin: tuple[BlockHash, ...] = ()
        if index and rng.random() < traffic.reuse:
            begin = hashes[int(rng.integers(max(0, index - 20), index))][:blocks]
        own = [f"{traffic.home} {index} {k}".encode() for k in range(len(begin), blocks)]
        hashes.append((*begin, *map(BlockHash, own)))
    return tokens, hashes


def _reuses(case: Case) -> bool:
    return any(traffic.reuse for traffic in case.traffic)


def config_of(case: Case, seconds: float) -> SimConfig:
    homes = {home.name for home in case.deployment.homes}
    round_trips = {
        (ClusterId(link.source), ClusterId(link.target)): link.rtt_ms / 1e3
        for link in case.deployment.links
        if {link.source, link.target} <= homes
    }
    rates: dict[LinkId, tuple[RateChange, ...]] = {}
    faults: list[Fault] = []
    for cluster in case.deployment.clusters:
        faults += [NodeFault(NodeId(node), 0.0) for node in cluster.absent]
        for node in cluster.nodes:
            if (pace := case.deployment.pace(node)) != 1:
                faults.append(SlowFault(NodeId(node), pace, 0.0))
    for event in case.events:
        begin_s = event.at * seconds
        end_s = np.inf if event.until is None else event.until * seconds
        match event.kind:
            case "node_lost":
                faults.append(NodeFault(NodeId(event.what), begin_s, end_s))
            case "cluster_lost":
                faults.append(ClusterFault(ClusterId(event.what), begin_s, end_s))
            case "drained":
                faults.append(DrainFault(ClusterId(event.what), begin_s, end_s))
            case "slow":
                faults.append(SlowFault(NodeId(event.what), event.factor, begin_s, end_s))
            case "link_cut":
                faults.append(LinkFault(_link(event), begin_s, end_s))
            case "link_thin":
                changes = [RateChange(begin_s, event.factor)]
                if event.until is not None:
                    changes.append(RateChange(end_s, 1.0))
                both = (*rates.get(_link(event), ()), *changes)
                rates[_link(event)] = tuple(sorted(both, key=lambda change: change.at_s))
            case "flood" | "gateway_killed":
                pass
    rules = SchedulerSection(policy=case.policy)
    config = SimConfig(scheduler=rules, round_trips=round_trips, links=rates, faults=tuple(faults))
    if _reuses(case):
        config = replace(config, cache=CacheConfig(2e9, block_tokens=BLOCK_TOKENS))
    return config


def _link(event: EventCase) -> LinkId:
    source, _, target = event.what.partition(">")
    return ClusterId(source), ClusterId(target)
