"""The simulated deployment: nodes, links, caches, and the real scheduler that routes between them.

The path of a request; each arrow is an event or a queue:

    arrival ─ route ─► grant ─► copies ─► prefill queue ─► prefill ─► hand-off ─► slot ─► last token
                        │                                   └ KV leaves while it runs ┘
                        └ decode memory is reserved here, and freed after the last token

The router sees the board and never the nodes. Reports and cache events reach the board
late; the router's own dispatches reach it at once. Faults and role changes are in `faults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Path, Problem
from prfaas.scheduler.board import Board, NodeReport
from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.costs import build_costs
from prfaas.scheduler.homes.plans import as_network, home_name
from prfaas.scheduler.long_term.profile_correction import ProfileCorrection
from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.scheduler.lookup.prefixes import (
    EVERY_NODE,
    NOTHING_CACHED,
    CachedPrefixes,
    Holders,
)
from prfaas.scheduler.plan import Role
from prfaas.scheduler.request import CacheCopy, Request, Route
from prfaas.scheduler.view import LinkId, LinkView
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.sim.alone import ServedAlone
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.attempt import Attempt
from prfaas.sim.caches import Caches
from prfaas.sim.config import SimConfig, SlowFault, node_names
from prfaas.sim.events import Events
from prfaas.sim.homes import SimHomes
from prfaas.sim.network.links import FluidLink
from prfaas.sim.nodes import Batch, SimNode
from prfaas.sim.results.meters import QueueSamples, RequestColumns, StageMeter, StageNames
from prfaas.sim.results.result import TimelineSpan
from prfaas.types import ClusterId, LinkStats, NodeId

QUIET_UTILISATION = 0.5  # far below any utilisation at which a verdict could change
ROLE_SWITCH_S = 10.0  # between the end of the drain and the first work of the new role


class Observer(Protocol):
    """Is told what happens, and changes nothing."""

    def record_dispatch(
        self, request: Request, home: ClusterId, cached: CachedPrefixes, route: Route
    ) -> None:
        """Before the board has the dispatch."""

    def record_role(self, node: SimNode) -> None: ...

    def take(self, reports: Mapping[LinkId, LinkStats], *, at_once: bool = False) -> None:
        """`reports`: of the links, as of now."""


class _UniformPrefix:
    """A prefix that every node holds, as workloads state it."""

    __slots__ = ("attention_tokens", "tokens")
    pool_tokens: int | None = None
    remote_pool_tokens: int | None = None

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.attention_tokens = tokens


class _UniformPrefixes:
    """The same cached prefix at every node, by its length. Used where no cache is simulated."""

    def __init__(self, nodes: Iterable[NodeId]) -> None:
        self._numbers = {node: number for number, node in enumerate(nodes)}
        self._found = {0: NOTHING_CACHED}

    def match(self, tokens: int) -> CachedPrefixes:
        found = self._found.get(tokens)
        if found is None:
            holders = Holders(_UniformPrefix(tokens), EVERY_NODE)
            found = self._found[tokens] = CachedPrefixes([holders], self._numbers)
        return found


class World:
    """The state of one run. `run.simulate` feeds it with arrivals."""

    def __init__(
        self, problem: Problem | NetworkProblem, arrivals: Arrivals, config: SimConfig
    ) -> None:
        self.network = network = as_network(problem)
        self.config = config
        self.events = Events()
        homes = [home_name(home) for home in network.homes]
        # The nodes and the profile of every cluster, the PD clusters first.
        pools = [
            *(home.problem.local.pool for home in network.homes),
            *network.prfaas_pools.values(),
        ]
        members = [
            (ClusterId(pool.cluster), node_names(pool.cluster, pool.instances), pool.profile)
            for pool in pools
        ]
        self.paths = _paths(network)
        self.egress = [(source, target) for source, target in self.paths if target in homes]
        self.columns = RequestColumns(arrivals, [cluster for cluster, _, _ in members])
        self.stages = StageMeter(arrivals, StageNames(homes, self.egress))
        self.spans: list[TimelineSpan] = []
        self.copies = 0
        self.copied_bytes = 0
        self.in_flight = 0  # requests that have arrived and have not ended
        self.waiting_room: WaitingRoom[int] = WaitingRoom()
        self._prompts: list[int] = arrivals.prompt_tokens.tolist()
        self._outputs: list[int] = arrivals.output_tokens.tolist()
        self._cached: list[int] = arrivals.cached_tokens.tolist()
        self._times: list[float] = arrivals.at_s.tolist()
        self._hashes = arrivals.hashes
        self._answers = arrivals.answers

        numbers = [0] * len(arrivals) if arrivals.homes is None else arrivals.homes.tolist()
        self._homes = [homes[number] for number in numbers]  # of the requests
        nodes = {cluster: names for cluster, names, _ in members}
        self.homes = SimHomes(network, nodes, config)
        self.waiting_room.share = self.homes.weight
        longest = max(self._prompts)
        self.costs = {home_name(home): build_costs(home.problem, longest) for home in network.homes}
        window_s = config.scheduler.replan.window_s
        self.traffic = {home: TrafficHistory(0.0, window_s) for home in homes}
        self.caches: Caches | None = None
        self._block_tokens = 1 if config.cache is None else config.cache.block_tokens
        if config.cache is not None:
            each = [(node, cluster, p) for cluster, names, p in members for node in names]
            spec = network.homes[0].problem.spec
            self.caches = Caches(spec, config.cache, each, self.events, config.event_lag_s)
        self.alone = ServedAlone(config.scheduler.alone)
        # Without faults that change them, nodes take as long as their profiles state.
        self.correction: ProfileCorrection | None = None
        if any(isinstance(fault, SlowFault) for fault in config.faults):
            self.correction = ProfileCorrection(config.scheduler.correction)
        self.links = {
            name: FluidLink(self.events, path.bps, config.report_interval_s)
            for name, path in self.paths.items()
        }
        views = {
            name: LinkView(True, path.bps, path.rtt_s, None, 0.0)
            for name, path in self.paths.items()
        }
        rates = {home_name(home): home.problem.local.decode for home in network.homes}
        self.slots = {home: rate.bs_max for home, rate in rates.items()}
        self.board = Board(
            self.costs,
            [(cluster, names) for cluster, names, _ in members],
            views,
            slots=self.slots,
            kv_bytes=config.decode_kv_bytes,
        )
        self.waiting_room.is_blocked = self._is_blocked
        self.nodes: dict[NodeId, SimNode] = {}
        for cluster, names, _ in members:
            for name in names:
                plan = self.homes.plans.get(cluster)
                role: Role = "prefill" if plan is None else plan.roles[name]
                rate = rates.get(cluster, rates[homes[0]])  # a PrfaaS node never decodes
                batch = Batch(self.events, rate, self._on_last_token)
                node = SimNode(name, cluster, role, batch, config.decode_kv_bytes)
                self.nodes[name] = node
                self.board.assign(name, role, usable=True)
        # Requests in prefill queues, by cluster, and requests that wait for a decode slot.
        self.prefill_waiting = {cluster: 0 for cluster, _, _ in members}
        self.slot_waiting = 0
        self.samples = QueueSamples(config.report_interval_s, [c for c, _, _ in members])
        self._uniform = _UniformPrefixes(self.nodes)
        self.reports = Reports(self)
        self.recorder: Observer | None = None
        self.count_capacity()

    # Arrival --------------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        """The request of that index arrives now."""
        self.in_flight += 1
        self.reports.ensure_running()
        self.try_route(index)

    def try_route(self, index: int) -> None:
        """Dispatches a request, or puts it into the waiting room."""
        hold = self._try_dispatch(index)
        if hold is None:
            return
        self.waiting_room.put(index, hold, self._homes[index])
        if hold.cluster is not None and self._has_room(hold.cluster):
            # The request waits although there is room, because others have waited longer. They get
            # the free node now.
            self.retry_waiting()

    def retry_waiting(self) -> None:
        """Retries the requests that the router holds, as far as there is room."""
        self.waiting_room.retry(self._try_dispatch, self._has_room)

    def _has_room(self, cluster: ClusterId) -> bool:
        return self.homes.has_room(cluster, self.board, self.events.now_s)

    def _try_dispatch(self, index: int) -> Hold | None:
        """Routes and dispatches a request. Returns its hold if the router decides that it waits."""
        now = self.events.now_s
        if self.caches is not None and self._hashes is not None:
            cached = self.caches.match(self._hashes[index])
        else:
            cached = self._uniform.match(self._cached[index])
        request = Request(index, self._prompts[index], self._times[index])
        home, room = self._homes[index], self.waiting_room
        decision = self.homes.route(request, home, self.board, cached, room, now)
        prompt_tokens = self._prompts[index]
        if isinstance(decision, Hold):
            return decision
        if self.caches is not None and self._hashes is not None and decision.alone:
            hashes = self._hashes[index]
            if self.alone.is_refused(decision, self.caches, hashes, prompt_tokens):
                request = request._replace(no_alone=True)
                decision = self.homes.route(request, home, self.board, cached, room, now)
                if isinstance(decision, Hold):
                    return decision
        costs = self.costs[decision.decode_cluster]
        kv_bytes = float(costs.handoff_bytes(prompt_tokens, prompt_tokens))
        if self.recorder is not None:
            self.recorder.record_dispatch(request, home, cached, decision)
        attempt = Attempt(index, decision, self.board.record_dispatch(decision, kv_bytes, now))
        self.homes.record_dispatch(decision, home, room, now)
        self.nodes[decision.prefill].prefills[attempt] = None
        decode = self.nodes[decision.decode]
        decode.decodes[attempt] = None
        if not self.columns.retries[index]:
            hold_s = self._outputs[index] * costs.t_decode_s
            self.stages.offer_request(decision, hold_s, now)
        if decode.free_kv_bytes < kv_bytes or decode.for_memory:
            decode.for_memory.append(attempt)
        else:
            self._grant(attempt, decode)
        return None

    def _grant(self, attempt: Attempt, decode: SimNode) -> None:
        decode.free_kv_bytes -= attempt.kv_bytes
        if self.caches is not None and self._hashes is not None:
            hashes = self._hashes[attempt.index]
            held = self.caches.held_tokens(decode.name, hashes)
            attempt.transfer_tokens = self._prompts[attempt.index] - held
        node = self.nodes[attempt.route.prefill]
        node.queue.append(attempt)
        self.prefill_waiting[node.cluster] += 1
        for copy in attempt.route.copies:
            self._copy(attempt, copy)
        self.next_prefill(node)

    def _is_blocked(self, cluster: ClusterId, home: str, work_s: float) -> bool:
        return self.homes.is_blocked(cluster, home, work_s, self.board, self.events.now_s)

    # Copies of cached prefixes --------------------------------------------------------------------

    def _copy(self, attempt: Attempt, copy: CacheCopy) -> None:
        attempt.copies_left += 1
        self.copies += 1
        self.copied_bytes += copy.nbytes
        source, target = self.nodes[copy.source].cluster, self.nodes[copy.target].cluster
        if source == target:
            self.events.at(self.events.now_s + copy.seconds, self._on_copied, (attempt, copy))
            return
        rtt_s = self.paths[source, target].rtt_s

        def on_sent() -> None:
            self.events.at(self.events.now_s + rtt_s, self._on_copied, (attempt, copy))

        self.links[source, target].send(copy.nbytes * 8, on_sent)

    def _on_copied(self, done: tuple[Attempt, CacheCopy]) -> None:
        attempt, copy = done
        if attempt.is_over:
            return
        attempt.copies_left -= 1
        if self.caches is not None and self._hashes is not None:
            hashes = self._hashes[attempt.index][: copy.tokens // self._block_tokens]
            if self.caches.holds(copy.source, hashes):
                self.caches.store_copy(copy.target, hashes)
        self.next_prefill(self.nodes[attempt.route.prefill])

    # Prefill --------------------------------------------------------------------------------------

    def next_prefill(self, node: SimNode) -> None:
        """Starts the first prefill of the queue, if the node is free and its copies are made."""
        self.reports.note_change(node)
        if node.running is not None or not node.queue or node.queue[0].copies_left:
            return
        attempt = node.queue.popleft()
        self.prefill_waiting[node.cluster] -= 1
        node.running = attempt
        now = self.events.now_s
        index = attempt.index
        tokens = self._prompts[index]
        chosen = attempt.route
        costs = self.costs[chosen.decode_cluster]
        hit = chosen.cached_tokens
        if self.caches is not None and self._hashes is not None:
            if node.role == "decode":
                hit = self.caches.resumable_tokens(node.name, self._hashes[index])
            else:
                attempt.prefill_lease = self.caches.open(node.name, self._hashes[index])
                hit = 0 if attempt.prefill_lease is None else attempt.prefill_lease.match.tokens
        attempt.hit_tokens = hit = min(hit, tokens - 1)
        attempt.stated_s = costs.prefill_s[node.cluster](tokens - hit, hit)
        seconds = node.slowness * attempt.stated_s
        if chosen.alone:
            seconds = self.alone.start(node, chosen, tokens - hit, seconds)
        attempt.started_s = now
        attempt.service_s = seconds
        if chosen.offloaded:
            bits = attempt.transfer_tokens * costs.bytes_per_token * 8
            link = self.links[chosen.cluster, chosen.decode_cluster]
            attempt.transfer = link.produce(bits, seconds, partial(self._on_sent, attempt))
        self.events.at(now + seconds, self._on_prefilled, attempt)

    def _on_prefilled(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        now = self.events.now_s
        attempt.prefilled_s = now
        chosen = attempt.route
        node = self.nodes[chosen.prefill]
        node.running = None
        if attempt.prefill_lease is not None and self.caches is not None:
            self.caches.commit(node.name, attempt.prefill_lease)
            self.caches.release(node.name, attempt.prefill_lease)
            attempt.prefill_lease = None
        self.board.record_prefilled(attempt.dispatch, now)
        if self.correction is not None:
            self._correct(attempt, now)
        if not chosen.alone:  # the decode slots that it delays are busy for longer
            stage = self.stages.names.prefill_of(chosen)
            self.stages.use(stage, attempt.started_s, now)
        tokens = self._prompts[attempt.index]
        costs = self.costs[chosen.decode_cluster]
        if chosen.offloaded:
            assert attempt.transfer is not None
            closing_bits = costs.closing_bytes(tokens) * 8
            link = self.links[chosen.cluster, chosen.decode_cluster]
            link.drain(attempt.transfer, closing_bits)
        elif chosen.alone:
            self.events.at(now, self._on_handoff, attempt)
        else:
            fabric_bps = costs.fabric_bps(chosen.cluster)
            exposed_s = costs.exposed_s(
                tokens, attempt.transfer_tokens, attempt.service_s, fabric_bps
            )
            self.events.at(now + exposed_s, self._on_handoff, attempt)
        self.next_prefill(node)
        if self.waiting_room:
            self.retry_waiting()

    def _correct(self, attempt: Attempt, now_s: float) -> None:
        """The router learns how long the prefill took."""
        assert self.correction is not None
        taken = attempt.route
        self.correction.record_prefill(
            taken.cluster, taken.prefill, attempt.stated_s, attempt.started_s, now_s
        )
        self.apply_correction()

    def apply_correction(self) -> None:
        assert self.correction is not None
        for home, costs in self.costs.items():
            self.board.set_costs(costs.paced(self.correction.factors), home)
        for name in self.nodes:
            self.board.set_pace(name, self.correction.paces.get(name, 1.0))

    def _on_sent(self, attempt: Attempt) -> None:
        rtt_s = self.paths[attempt.route.cluster, attempt.route.decode_cluster].rtt_s
        self.events.at(self.events.now_s + rtt_s, self._on_handoff, attempt)

    # Decode ---------------------------------------------------------------------------------------

    def _on_handoff(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        now = self.events.now_s
        chosen = attempt.route
        attempt.landed = True
        self.board.record_handoff(attempt.dispatch, now, now - attempt.started_s)
        source = self.nodes[chosen.prefill]
        del source.prefills[attempt]
        index, columns = attempt.index, self.columns
        columns.wait_s[index] = attempt.started_s - self._times[index]
        columns.prefill_s[index] = attempt.service_s
        columns.transfer_s[index] = now - attempt.prefilled_s
        columns.hit_tokens[index] = attempt.hit_tokens
        columns.record_route(index, chosen)
        node = self.nodes[chosen.decode]
        if self.caches is not None and self._hashes is not None:
            self.caches.store_handoff(node.name, self._hashes[index], self._prompts[index])
        if self.config.timeline:
            self._span(chosen.prefill, "prefill", attempt.started_s, attempt.prefilled_s, attempt)
            where: str = chosen.prefill
            if chosen.offloaded:
                where = self.stages.names.link[chosen.cluster, chosen.decode_cluster]
            self._span(where, "hand-off", attempt.prefilled_s, now, attempt)
        if self.config.replans:
            new_tokens = self._prompts[index] - attempt.hit_tokens
            waited_s = attempt.started_s - self._times[index]
            self.traffic[chosen.decode_cluster].observe(
                now, new_tokens, attempt.hit_tokens, self._outputs[index], waited_s
            )
        attempt.prefilled_s = now  # the wait for a slot begins here
        attempt.transfer = None
        if node.batch.running < self.slots[chosen.decode_cluster]:
            self._decode(attempt, node)
        else:
            node.for_slot.append(attempt)
            self.slot_waiting += 1
        self.reports.note_change(node)
        self.switch_if_drained(source)
        if self.waiting_room:
            self.retry_waiting()

    def _decode(self, attempt: Attempt, node: SimNode) -> None:
        now = self.events.now_s
        index = attempt.index
        self.columns.slot_wait_s[index] = now - attempt.prefilled_s
        attempt.started_s = now
        first_s = node.batch.start(attempt, self._outputs[index])
        self.columns.first_token_s[index] = first_s + attempt.route.round_trip_s

    def _on_last_token(self, attempt: Attempt) -> None:
        now = self.events.now_s
        node = self.nodes[attempt.route.decode]
        self.columns.last_token_s[attempt.index] = now + attempt.route.round_trip_s
        stage = self.stages.names.decode[attempt.route.decode_cluster]
        self.stages.use(stage, attempt.started_s, now)
        if self.config.timeline:
            self._span(node.name, "decode", attempt.started_s, now, attempt)
        del node.decodes[attempt]
        attempt.is_over = True
        if self.caches is not None and self._answers is not None:
            index = attempt.index
            self.caches.store_answer(node.name, self._answers[index], self._prompts[index])
        self.board.record_end(attempt.dispatch)
        self.in_flight -= 1
        self.free_memory(node, attempt.kv_bytes)
        if node.for_slot:
            self.slot_waiting -= 1
            self._decode(node.for_slot.popleft(), node)
        self.reports.note_change(node)
        self.switch_if_drained(node)

    def free_memory(self, node: SimNode, kv_bytes: float) -> None:
        """Frees decode memory, and grants it to the attempts that wait for it."""
        node.free_kv_bytes += kv_bytes
        waiting = node.for_memory
        while waiting and waiting[0].kv_bytes <= node.free_kv_bytes:
            self._grant(waiting.popleft(), node)

    def switch_if_drained(self, node: SimNode) -> None:
        """Starts the role change of a node that has just finished its last work of the old role."""
        plan = self.homes.plans.get(node.cluster)
        if plan is None or node.switching or not node.alive:
            return
        if node.role != plan.roles[node.name] and node.drained:
            node.switching = True
            self.events.at(self.events.now_s + ROLE_SWITCH_S, self._on_switched, node)

    def _on_switched(self, node: SimNode) -> None:
        node.switching = False
        if not node.alive:
            return
        node.role = self.homes.plans[node.cluster].roles[node.name]
        self.board.assign(node.name, node.role, usable=node.in_use)
        if self.recorder is not None:
            self.recorder.record_role(node)
        self.count_capacity()

    # Measurements ---------------------------------------------------------------------------------

    def count_capacity(self) -> None:
        """Records what each stage can do from now on."""
        now = self.events.now_s
        names = self.stages.names
        servers: dict[str, int] = {}
        for home in self.homes.names:
            servers |= {names.prefill[home]: 0, names.decode[home]: 0}
        for cluster in self.network.prfaas_pools:
            servers[cluster] = 0
        for node in self.nodes.values():
            stage: str = node.cluster
            decodes = node.role == "decode"
            if node.cluster in self.homes.plans:
                stage = names.decode[node.cluster] if decodes else names.prefill[node.cluster]
            if node.alive and not node.switching:
                servers[stage] += self.slots[node.cluster] if decodes else 1
        for stage, count in servers.items():
            self.stages.set_capacity(stage, count, now)
        for link in self.egress:
            self.stages.set_capacity(names.link[link], self.links[link].bps, now)

    def link_reports(self) -> dict[LinkId, LinkStats]:
        """Of all links, as of now."""
        return {
            link_id: link.report(link_id[1], self.paths[link_id].rtt_s)
            for link_id, link in self.links.items()
        }

    def _span(self, track: str, name: str, start_s: float, end_s: float, attempt: Attempt) -> None:
        self.spans.append(
            TimelineSpan(track, name, start_s, end_s, attempt.index, attempt.route.reason)
        )


def _paths(network: NetworkProblem) -> dict[LinkId, Path]:
    paths: dict[LinkId, Path] = {}
    for home in network.homes:
        for remote in home.problem.remotes:
            source, target = ClusterId(remote.pool.cluster), home_name(home)
            paths[source, target] = remote.path
            if remote.back is not None:
                paths[target, source] = remote.back
    return paths


class Reports:
    """Periodic reports of nodes and links, as the router receives them: a little late. They pause
    while no request is in flight, so that an idle stretch of a trace costs nothing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._changed: dict[SimNode, None] = {}  # nodes whose state differs from their last report
        self._running = False

    def note_change(self, node: SimNode) -> None:
        """The node's next report is due: its queue or its batch has changed."""
        self._changed[node] = None

    def ensure_running(self) -> None:
        """Starts the periodic reports, unless they run already."""
        if not self._running:
            self._running = True
            events, interval = self._world.events, self._world.config.report_interval_s
            following = (int(events.now_s / interval) + 1) * interval
            events.at(following, self._tick)

    def _tick(self, _: object) -> None:
        """Sends every report that is due. The router receives them `report_lag_s` later."""
        world = self._world
        now = world.events.now_s
        reports = [
            (node.name, NodeReport(now, 0.0, node.batch.running + len(node.for_slot)))
            for node in self._changed
            if node.alive
        ]
        self._changed.clear()
        links = world.link_reports()
        stats = [(name, link) for name, link in links.items() if not self._is_redundant(name, link)]
        if world.recorder is not None:
            # The reports pause now where no request is in flight: so it stays until the next one.
            world.recorder.take(links, at_once=not world.in_flight)
        world.events.at(now + world.config.report_lag_s, self._deliver, (reports, stats))
        waiting: dict[str, int] = {
            c: n + world.waiting_room.count(c) for c, n in world.prefill_waiting.items()
        }
        world.samples.take(now, waiting, world.slot_waiting)
        if world.in_flight:
            world.events.at(now + world.config.report_interval_s, self._tick)
        else:
            self._running = False

    def _is_redundant(self, link_id: LinkId, report: LinkStats) -> bool:
        """Whether the link is clear, has capacity to spare and stays so. To judge such a link every
        second would take a tenth of a run's time, for the same verdict."""
        world = self._world
        known = world.homes.link_state(link_id)
        clear = known is None or (known.health.verdict is LinkVerdict.CLEAR and known.bps is None)
        busy = report.goodput_bps > QUIET_UTILISATION * world.paths[link_id].bps
        return (
            clear
            and not busy
            and not report.backlog_bytes
            and report.connections > 0
            and (link := world.board.link(link_id)) is not None
            and link.up
        )

    def _deliver(
        self, received: tuple[list[tuple[NodeId, NodeReport]], list[tuple[LinkId, LinkStats]]]
    ) -> None:
        world = self._world
        reports, stats = received
        for name, report in reports:
            world.board.record_report(name, report)
        for link_id, link_stats in stats:
            known = world.board.link(link_id)
            if known is None or known.stats is None or known.stats.at_s <= link_stats.at_s:
                # Otherwise the link was lost since then, which the router learned at once.
                world.board.record_link_report(link_id, link_stats)
        now = world.events.now_s
        if world.correction is not None:
            world.correction.doubt_old(now, world.board.has_own_prefills)
            world.apply_correction()
        world.homes.adjust(world.board, world.waiting_room.work, now)
        if world.waiting_room:
            world.retry_waiting()
