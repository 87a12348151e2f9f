"""What shakes a simulated deployment: lost nodes, changing bandwidth, new plans.

A lost node ends every attempt that depends on it. A request without its first token starts again;
one whose stream broke after it is an error to its client and ends there, as in the gateway.
"""

from __future__ import annotations

from prfaas.scheduler.long_term.replan import replan
from prfaas.scheduler.view import LinkId
from prfaas.sim.config import NodeFault
from prfaas.sim.job import Job
from prfaas.sim.nodes import SimNode
from prfaas.sim.results.result import PlanChange
from prfaas.sim.world import World


def schedule(world: World, until_s: float) -> None:
    """Plans every fault, rate change and replanning up to `until_s`."""
    upheaval = _Upheaval(world)
    events = world.events
    for fault in world.config.faults:
        events.at(fault.at_s, upheaval.lose, fault)
        if fault.until_s < float("inf"):
            events.at(fault.until_s, upheaval.recover, fault)
    for way, changes in world.config.links.items():
        for change in changes:
            events.at(change.at_s, upheaval.change_rate, (way, change.share))
    if world.config.replans:
        every_s = world.config.scheduler.replan.every_s
        for count in range(1, int(until_s / every_s) + 1):
            events.at(count * every_s, upheaval.replan)


class _Upheaval:
    def __init__(self, world: World) -> None:
        self._world = world

    def change_rate(self, what: tuple[LinkId, float]) -> None:
        way, share = what
        self._world.links[way].set_bps(self._world.paths[way].bps * share)
        self._world.count_capacity()

    def replan(self, _: object) -> None:
        world = self._world
        live = {name for name, n in world.nodes.items() if n.alive and n.cluster == world.local}
        remotes = tuple(
            sum(n.alive for n in world.nodes.values() if n.cluster == remote.pool.cluster)
            for remote in world.plan.problem.remotes
        )
        window = world.traffic.window(world.events.now_s, remotes, live)
        new = replan(window, world.plan)
        if new is None:
            return
        world.plan = new
        world.plans.append(PlanChange(world.events.now_s, new))
        for name in live:
            node = world.nodes[name]
            if not node.switching:
                stays = node.role == new.roles[name]
                world.board.assign(name, node.role, usable=stays)
                world.drained(node)

    def lose(self, fault: NodeFault) -> None:
        world = self._world
        node = world.nodes[fault.node]
        if not node.alive:
            return
        node.alive = False
        world.board.assign(node.name, node.role, usable=False)
        lost = [*node.prefills, *(job for job in node.decodes if job not in node.prefills)]
        again = [job.index for job in lost if self._end(job, node)]
        world.waiting[node.cluster] -= len(node.queue)
        world.slot_waiting -= len(node.for_slot)
        node.queue.clear()
        node.queued_s = 0.0
        node.running = None
        node.for_slot.clear()
        node.for_memory.clear()
        node.batch.clear()
        node.free_kv_bytes = world.config.decode_kv_bytes
        if world.caches is not None:
            world.caches.leave(node.name)
        world.board.emptied(node.name)
        world.count_capacity()
        for index in again:
            world.columns.retries[index] += 1
            world.try_route(index)

    def recover(self, fault: NodeFault) -> None:
        world = self._world
        node = world.nodes[fault.node]
        node.alive = True
        if node.cluster == world.local:
            node.role = world.plan.roles[node.name]
        if world.caches is not None:
            world.caches.join(node.name)
        world.board.assign(node.name, node.role, usable=True)
        world.count_capacity()

    def _end(self, job: Job, lost: SimNode) -> bool:
        """Ends an attempt; whether the request is to start again."""
        world = self._world
        job.over = True
        way = job.route
        source, target = world.nodes[way.prefill], world.nodes[way.decode]
        source.prefills.pop(job, None)
        target.decodes.pop(job, None)
        if job.landed:
            world.board.ended(way, job.kv_bytes)
        else:
            world.board.given_up(way, job.kv_bytes)
        if job.flow is not None:
            world.links[way.cluster, world.local].cancel(job.flow)
        if source is not lost:
            self._leave_source(job, source)
        if target is not lost:
            self._leave_target(job, target)
        begun = world.columns.first_token_s[job.index] <= world.events.now_s
        if begun:
            world.in_flight -= 1
        else:
            world.columns.first_token_s[job.index] = float("nan")
        return not begun

    def _leave_source(self, job: Job, source: SimNode) -> None:
        world = self._world
        if job in source.queue:
            source.queue.remove(job)
            world.waiting[source.cluster] -= 1
            source.queued_s -= job.route.prefill_s
        if job.prefill_lease is not None and world.caches is not None:
            world.caches.release(source.name, job.prefill_lease)
        if source.running is job:
            source.running = None
            world.next_prefill(source)

    def _leave_target(self, job: Job, target: SimNode) -> None:
        world = self._world
        if job in target.for_memory:
            target.for_memory.remove(job)
            return  # nothing was granted
        world.give_memory(target, job.kv_bytes)
