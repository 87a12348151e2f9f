"""The simulated deployment: nodes, links, caches, and the real scheduler that routes between them.

The life of a request, each arrow an event or a queue:

    arrival ─ route ─► grant ─► copies ─► prefill queue ─► prefill ─► hand-off ─► slot ─► last token
                        │                                   └ leaves while it runs ┘
                        └ decode memory is promised here, and given back at the end

The router sees the board, never the nodes: reports and cache events reach it late, and its own
dispatches at once. Faults and role changes are in `upheaval`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prfaas.planner.problem import Path, Problem
from prfaas.scheduler.board import Board, NodeReport
from prfaas.scheduler.congestion import Verdict
from prfaas.scheduler.costs import costs_of
from prfaas.scheduler.long_term.traffic import Traffic
from prfaas.scheduler.plan import Plan, Role, first_plan, hardware_for
from prfaas.scheduler.request import CacheCopy, Request
from prfaas.scheduler.short_term import adjust, has_room, route
from prfaas.scheduler.state import State
from prfaas.scheduler.view import CachedPrefix, LinkId, LinkView
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.caches import Caches
from prfaas.sim.config import SimConfig, link_id, local_nodes, node_names
from prfaas.sim.events import Events
from prfaas.sim.job import Job
from prfaas.sim.links import FluidLink
from prfaas.sim.nodes import Batch, SimNode
from prfaas.sim.results.meters import Columns, Load, Samples
from prfaas.sim.results.result import PlanChange, Span
from prfaas.types import ClusterId, LinkStats, NodeId

NOTHING: Mapping[NodeId, CachedPrefix] = {}
DULL_UTILISATION = 0.5  # well below where a verdict could change


class _Everywhere:
    """A prefix that every node holds, as workloads state it."""

    __slots__ = ("attention_tokens", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.attention_tokens = tokens


class World:
    def __init__(self, problem: Problem, arrivals: Arrivals, config: SimConfig) -> None:
        self.problem = problem
        self.config = config
        self.events = Events()
        self.columns = Columns(arrivals)
        self.load = Load(arrivals)
        self.spans: list[Span] = []
        self.copies = 0
        self.copied_bytes = 0
        self.in_flight = 0  # requests that have arrived and have not ended
        self.held: WaitingRoom[int] = WaitingRoom()
        self._prompts: list[int] = arrivals.prompt_tokens.tolist()
        self._outputs: list[int] = arrivals.output_tokens.tolist()
        self._cached: list[int] = arrivals.cached_tokens.tolist()
        self._times: list[float] = arrivals.at_s.tolist()
        self._hashes = arrivals.hashes
        self._everywhere: dict[int, Mapping[NodeId, CachedPrefix]] = {0: NOTHING}

        local = ClusterId(problem.local.pool.cluster)
        members = [(local, local_nodes(problem), problem.local.pool.profile)]
        for remote in problem.remotes:
            pool = remote.pool
            names = node_names(pool.cluster, pool.instances)
            members.append((ClusterId(pool.cluster), names, pool.profile))
        self.local = local
        rules = config.scheduler
        planned = hardware_for(rules.policy, problem)
        self.plan: Plan = first_plan(planned, members[0][1], rules.replan)
        self.plans = [PlanChange(0.0, self.plan)]
        self.state = State(config.scheduler)
        self.costs = costs_of(problem, max(self._prompts))
        self.traffic = Traffic(0.0, config.scheduler.replan.window_s)
        self.caches: Caches | None = None
        self._block_tokens = 1 if config.cache is None else config.cache.block_tokens
        if config.cache is not None:
            each = [(node, cluster, p) for cluster, names, p in members for node in names]
            self.caches = Caches(problem.spec, config.cache, each, self.events, config.event_lag_s)
        self.paths = _paths(problem)
        self.links = {
            way: FluidLink(self.events, path.bps, config.report_interval_s)
            for way, path in self.paths.items()
        }
        views = {
            way: LinkView(True, path.bps, path.rtt_s, None, 0.0) for way, path in self.paths.items()
        }
        rate = problem.local.decode
        self.board = Board(
            self.costs,
            [(cluster, names) for cluster, names, _ in members],
            views,
            slots=rate.bs_max,
            kv_bytes=config.decode_kv_bytes,
        )
        self.slots = rate.bs_max
        self.nodes: dict[NodeId, SimNode] = {}
        for cluster, names, _ in members:
            for name in names:
                role: Role = self.plan.roles[name] if cluster == local else "prefill"
                batch = Batch(self.events, rate, self._ended)
                node = SimNode(name, cluster, role, batch, config.decode_kv_bytes)
                self.nodes[name] = node
                self.board.assign(name, role, usable=True)
        self.waiting = {cluster: 0 for cluster, _, _ in members}  # for a prefill, at the nodes
        self.slot_waiting = 0  # for a decode slot
        self.samples = Samples(config.report_interval_s, [c for c, _, _ in members])
        self._told: dict[SimNode, None] = {}  # whose state has changed since their last report
        self._ticking = False
        self.count_capacity()

    # Arrival --------------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        self.in_flight += 1
        if not self._ticking:
            self._ticking = True
            interval = self.config.report_interval_s
            following = (int(self.events.now_s / interval) + 1) * interval
            self.events.at(following, self._tick)
        self.try_route(index)

    def try_route(self, index: int) -> None:
        hold = self._try_dispatch(index)
        if hold is None:
            return
        self.held.put(index, hold)
        if hold.cluster is not None and self._has_room(hold.cluster):
            # The request waits although there is room, because others have waited longer. They get
            # the free node now.
            self.retry_held()

    def retry_held(self) -> None:
        """Retries the requests that the router holds, as far as there is room."""
        self.held.retry(self._try_dispatch, self._has_room)

    def _has_room(self, cluster: ClusterId) -> bool:
        view = self.board.view(self.events.now_s, NOTHING, self.held.work)
        return has_room(cluster, view, self.state)

    def _try_dispatch(self, index: int) -> Hold | None:
        """Routes and dispatches a request. Returns its hold if the router decides that it waits."""
        now = self.events.now_s
        if self.caches is not None and self._hashes is not None:
            cached: Mapping[NodeId, CachedPrefix] = self.caches.match(self._hashes[index])
        else:
            cached = self._held_everywhere(self._cached[index])
        request = Request(index, self._prompts[index], self._times[index])
        view = self.board.view(now, cached, self.held.work)
        way = route(request, view, self.plan, self.state)
        if isinstance(way, Hold):
            return way
        prompt_tokens = self._prompts[index]
        kv_bytes = float(self.costs.handoff_bytes(prompt_tokens, prompt_tokens))
        job = Job(index, way, kv_bytes)
        self.board.dispatched(way, kv_bytes, now)
        self.nodes[way.prefill].prefills[job] = None
        decode = self.nodes[way.decode]
        decode.decodes[job] = None
        if not self.columns.retries[index]:
            self._offer(job, now)
        if decode.free_kv_bytes < kv_bytes or decode.for_memory:
            decode.for_memory.append(job)
        else:
            self._grant(job, decode)
        return None

    def _held_everywhere(self, tokens: int) -> Mapping[NodeId, CachedPrefix]:
        held = self._everywhere.get(tokens)
        if held is None:
            held = self._everywhere[tokens] = dict.fromkeys(self.nodes, _Everywhere(tokens))
        return held

    def _grant(self, job: Job, decode: SimNode) -> None:
        decode.free_kv_bytes -= job.kv_bytes
        if self.caches is not None and self._hashes is not None:
            hashes = self._hashes[job.index]
            held = self.caches.held_tokens(decode.name, hashes)
            job.transfer_tokens = self._prompts[job.index] - held
        node = self.nodes[job.route.prefill]
        node.queue.append(job)
        self.waiting[node.cluster] += 1
        node.queued_s += job.route.prefill_s
        for copy in job.route.copies:
            self._copy(job, copy)
        self.next_prefill(node)

    # Copies of cached prefixes --------------------------------------------------------------------

    def _copy(self, job: Job, copy: CacheCopy) -> None:
        job.copies_left += 1
        self.copies += 1
        self.copied_bytes += copy.nbytes
        source, target = self.nodes[copy.source].cluster, self.nodes[copy.target].cluster
        if source == target:
            self.events.at(self.events.now_s + copy.seconds, self._copied, (job, copy))
            return
        rtt_s = self.paths[source, target].rtt_s

        def left() -> None:
            self.events.at(self.events.now_s + rtt_s, self._copied, (job, copy))

        self.links[source, target].send(copy.nbytes * 8, left)

    def _copied(self, what: tuple[Job, CacheCopy]) -> None:
        job, copy = what
        if job.over:
            return
        job.copies_left -= 1
        if self.caches is not None and self._hashes is not None:
            hashes = self._hashes[job.index][: copy.tokens // self._block_tokens]
            if self.caches.holds(copy.source, hashes):
                self.caches.copied(copy.target, hashes)
        self.next_prefill(self.nodes[job.route.prefill])

    # Prefill --------------------------------------------------------------------------------------

    def next_prefill(self, node: SimNode) -> None:
        """Starts the first in the queue, if the node is free and its copies are made."""
        self._told[node] = None
        if node.running is not None or not node.queue or node.queue[0].copies_left:
            return
        job = node.queue.popleft()
        self.waiting[node.cluster] -= 1
        node.queued_s -= job.route.prefill_s
        node.running = job
        now = self.events.now_s
        index = job.index
        tokens = self._prompts[index]
        way = job.route
        if self.caches is not None and self._hashes is not None:
            job.prefill_lease = self.caches.open(node.name, self._hashes[index])
            hit = 0 if job.prefill_lease is None else job.prefill_lease.match.tokens
            job.hit_tokens = min(hit, tokens - 1)
            seconds = self.costs.prefill_s[node.cluster](tokens - job.hit_tokens, job.hit_tokens)
        else:
            job.hit_tokens = way.cached_tokens
            seconds = way.prefill_s
        job.started_s = now
        job.service_s = seconds
        if way.offloaded:
            bits = job.transfer_tokens * self.costs.bytes_per_token * 8
            landed = partial(self._left_link, job)
            job.flow = self.links[way.cluster, self.local].produce(bits, seconds, landed)
        self.events.at(now + seconds, self._prefilled, job)

    def _prefilled(self, job: Job) -> None:
        if job.over:
            return
        now = self.events.now_s
        job.prefilled_s = now
        way = job.route
        node = self.nodes[way.prefill]
        node.running = None
        if job.prefill_lease is not None and self.caches is not None:
            self.caches.commit(node.name, job.prefill_lease)
            self.caches.release(node.name, job.prefill_lease)
            job.prefill_lease = None
        stage = way.cluster if way.offloaded else "pd_p"
        self.load.use(stage, job.started_s, now)
        tokens = self._prompts[job.index]
        if way.offloaded:
            assert job.flow is not None
            closing_bits = self.costs.closing_bytes(tokens) * 8
            self.links[way.cluster, self.local].drain(job.flow, closing_bits)
        else:
            fabric_bps = self.costs.fabric_bps(self.local)
            lacking = job.transfer_tokens
            exposed_s = self.costs.exposed_s(tokens, lacking, job.service_s, fabric_bps)
            self.events.at(now + exposed_s, self._landed, job)
        self.next_prefill(node)

    def _left_link(self, job: Job) -> None:
        rtt_s = self.paths[job.route.cluster, self.local].rtt_s
        self.events.at(self.events.now_s + rtt_s, self._landed, job)

    # Decode ---------------------------------------------------------------------------------------

    def _landed(self, job: Job) -> None:
        if job.over:
            return
        now = self.events.now_s
        way = job.route
        job.landed = True
        self.board.landed(way)
        source = self.nodes[way.prefill]
        del source.prefills[job]
        index, columns = job.index, self.columns
        columns.wait_s[index] = job.started_s - self._times[index]
        columns.prefill_s[index] = job.service_s
        columns.transfer_s[index] = now - job.prefilled_s
        columns.hit_tokens[index] = job.hit_tokens
        columns.offloaded[index] = way.offloaded
        node = self.nodes[way.decode]
        if self.caches is not None and self._hashes is not None:
            self.caches.handed(node.name, self._hashes[index], self._prompts[index])
        if self.config.timeline:
            self._span(way.prefill, "prefill", job.started_s, job.prefilled_s, job)
            where = f"link {way.cluster}" if way.offloaded else way.prefill
            self._span(where, "hand-off", job.prefilled_s, now, job)
        if self.config.replans:
            new_tokens = self._prompts[index] - job.hit_tokens
            waited_s = job.started_s - self._times[index]
            self.traffic.observe(now, new_tokens, job.hit_tokens, self._outputs[index], waited_s)
        job.prefilled_s = now  # from here on it waits for a slot
        job.flow = None
        if node.batch.running < self.slots:
            self._decode(job, node)
        else:
            node.for_slot.append(job)
            self.slot_waiting += 1
        self._told[node] = None
        self.drained(source)
        if self.held:
            self.retry_held()

    def _decode(self, job: Job, node: SimNode) -> None:
        now = self.events.now_s
        index = job.index
        self.columns.slot_wait_s[index] = now - job.prefilled_s
        job.started_s = now
        first_s = node.batch.start(job, self._outputs[index])
        self.columns.first_token_s[index] = first_s

    def _ended(self, job: Job) -> None:
        now = self.events.now_s
        node = self.nodes[job.route.decode]
        self.columns.last_token_s[job.index] = now
        self.load.use("pd_d", job.started_s, now)
        if self.config.timeline:
            self._span(node.name, "decode", job.started_s, now, job)
        del node.decodes[job]
        job.over = True
        self.board.ended(job.route, job.kv_bytes)
        self.in_flight -= 1
        self.give_memory(node, job.kv_bytes)
        if node.for_slot:
            self.slot_waiting -= 1
            self._decode(node.for_slot.popleft(), node)
        self._told[node] = None
        self.drained(node)

    def give_memory(self, node: SimNode, kv_bytes: float) -> None:
        node.free_kv_bytes += kv_bytes
        waiting = node.for_memory
        while waiting and waiting[0].kv_bytes <= node.free_kv_bytes:
            self._grant(waiting.popleft(), node)

    def drained(self, node: SimNode) -> None:
        """A node has finished something: if it drains towards another role, it may be empty now."""
        if node.cluster != self.local or node.switching or not node.alive:
            return
        if node.role != self.plan.roles[node.name] and node.drained:
            node.switching = True
            self.events.at(self.events.now_s + self.config.role_switch_s, self._switched, node)

    def _switched(self, node: SimNode) -> None:
        node.switching = False
        if not node.alive:
            return
        node.role = self.plan.roles[node.name]
        self.board.assign(node.name, node.role, usable=True)
        self.count_capacity()

    # Reports --------------------------------------------------------------------------------------

    def _tick(self, _: object) -> None:
        """Everybody reports; the router hears it a little later. Quiet while nothing goes on."""
        now = self.events.now_s
        reports = [
            (node.name, NodeReport(now, node.work_s(now), node.batch.running + len(node.for_slot)))
            for node in self._told
            if node.alive
        ]
        self._told.clear()
        stats = []
        for way, link in self.links.items():
            said = link.report(way[1], self.paths[way].rtt_s)
            if not self._is_dull(way, said):
                stats.append((way, said))
        self.events.at(now + self.config.report_lag_s, self._hear, (reports, stats))
        waiting: dict[str, int] = {c: n + self.held.count(c) for c, n in self.waiting.items()}
        self.samples.take(now, waiting, self.slot_waiting)
        if self.in_flight:
            self.events.at(now + self.config.report_interval_s, self._tick)
        else:
            self._ticking = False

    def _is_dull(self, way: LinkId, said: LinkStats) -> bool:
        """A clear link with room to spare that goes on so: judging it anew every second would be
        a tenth of a run's time, for the same verdict."""
        known = self.state.links.get(way)
        clear = known is None or (known.health.verdict is Verdict.CLEAR and known.bps is None)
        busy = said.goodput_bps > DULL_UTILISATION * self.paths[way].bps
        return (
            clear
            and not busy
            and not said.backlog_bytes
            and said.connections > 0
            and (self.board.is_up(way))
        )

    def _hear(
        self, heard: tuple[list[tuple[NodeId, NodeReport]], list[tuple[LinkId, LinkStats]]]
    ) -> None:
        for name, report in heard[0]:
            self.board.reported(name, report)
        for way, stats in heard[1]:
            self.board.link_reported(way, stats)
        now = self.events.now_s
        view = self.board.view(now, NOTHING, self.held.work)
        self.state = adjust(self.state, view, now)
        if self.held:
            self.retry_held()

    # Accounts -------------------------------------------------------------------------------------

    def count_capacity(self) -> None:
        """What each stage can do from now on."""
        now = self.events.now_s
        servers: dict[str, int] = {"pd_p": 0, "pd_d": 0}
        for remote in self.problem.remotes:
            servers[remote.pool.cluster] = 0
        for node in self.nodes.values():
            stage: str = node.cluster
            if node.cluster == self.local:
                stage = "pd_p" if node.role == "prefill" else "pd_d"
            servers[stage] += node.alive and not node.switching
        for stage, count in servers.items():
            each = self.slots if stage == "pd_d" else 1
            self.load.set_capacity(stage, count * each, now)
        for index, remote in enumerate(self.problem.remotes):
            link = self.links[link_id(self.problem, index)]
            self.load.set_capacity(f"link {remote.pool.cluster}", link.bps, now)

    def _offer(self, job: Job, now_s: float) -> None:
        way = job.route
        self.load.offer(way.cluster if way.offloaded else "pd_p", way.prefill_s, now_s)
        hold_s = self._outputs[job.index] * self.costs.t_decode_s
        self.load.offer("pd_d", hold_s, now_s)
        if way.offloaded:
            self.load.offer(f"link {way.cluster}", way.nbytes * 8, now_s)

    def _span(self, track: str, name: str, start_s: float, end_s: float, job: Job) -> None:
        self.spans.append(Span(track, name, start_s, end_s, job.index, job.route.reason))


def _paths(problem: Problem) -> dict[LinkId, Path]:
    local = ClusterId(problem.local.pool.cluster)
    paths: dict[LinkId, Path] = {}
    for remote in problem.remotes:
        name = ClusterId(remote.pool.cluster)
        paths[name, local] = remote.path
        if remote.back is not None:
            paths[local, name] = remote.back
    return paths
