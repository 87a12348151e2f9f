"""Scheduled changes of a simulated deployment: lost nodes, changing bandwidth, new plans.

A lost node ends every attempt that depends on it. A request without its first token starts again.
A request whose stream breaks after the first token ends there with an error, as in the gateway.
"""

from __future__ import annotations

from prfaas.scheduler.long_term.replan import replan
from prfaas.scheduler.view import LinkId
from prfaas.sim.attempt import Attempt
from prfaas.sim.config import NodeFault
from prfaas.sim.nodes import SimNode
from prfaas.sim.results.result import PlanChange
from prfaas.sim.world import World


def schedule_changes(world: World, until_s: float) -> None:
    """Schedules every fault, rate change and replanning up to `until_s`."""
    changes = _ScheduledChanges(world)
    events = world.events
    for fault in world.config.faults:
        events.at(fault.at_s, changes.lose_node, fault)
        if fault.until_s < float("inf"):
            events.at(fault.until_s, changes.recover_node, fault)
    for link_id, rates in world.config.links.items():
        for rate in rates:
            events.at(rate.at_s, changes.change_rate, (link_id, rate.share))
    if world.config.replans:
        every_s = world.config.scheduler.replan.every_s
        for count in range(1, int(until_s / every_s) + 1):
            events.at(count * every_s, changes.replan)


class _ScheduledChanges:
    def __init__(self, world: World) -> None:
        self._world = world

    def change_rate(self, change: tuple[LinkId, float]) -> None:
        link_id, share = change
        self._world.links[link_id].set_bps(self._world.paths[link_id].bps * share)
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
                world.switch_if_drained(node)

    def lose_node(self, fault: NodeFault) -> None:
        world = self._world
        node = world.nodes[fault.node]
        if not node.alive:
            return
        node.alive = False
        world.board.assign(node.name, node.role, usable=False)
        lost = [
            *node.prefills,
            *(attempt for attempt in node.decodes if attempt not in node.prefills),
        ]
        again = [attempt.index for attempt in lost if self._end(attempt, node)]
        world.prefill_waiting[node.cluster] -= len(node.queue)
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
        world.board.forget_work(node.name)
        world.count_capacity()
        for index in again:
            world.columns.retries[index] += 1
            world.try_route(index)

    def recover_node(self, fault: NodeFault) -> None:
        world = self._world
        node = world.nodes[fault.node]
        node.alive = True
        if node.cluster == world.local:
            node.role = world.plan.roles[node.name]
        if world.caches is not None:
            world.caches.join(node.name)
        world.board.assign(node.name, node.role, usable=True)
        world.count_capacity()

    def _end(self, attempt: Attempt, lost: SimNode) -> bool:
        """Ends an attempt. Returns whether the request starts again."""
        world = self._world
        attempt.is_over = True
        chosen = attempt.route
        source, target = world.nodes[chosen.prefill], world.nodes[chosen.decode]
        source.prefills.pop(attempt, None)
        target.decodes.pop(attempt, None)
        if attempt.landed:
            world.board.record_end(chosen, attempt.kv_bytes)
        else:
            world.board.record_failure(chosen, attempt.kv_bytes)
        if attempt.transfer is not None:
            world.links[chosen.cluster, world.local].cancel(attempt.transfer)
        if source is not lost:
            self._leave_source(attempt, source)
        if target is not lost:
            self._leave_target(attempt, target)
        begun = world.columns.first_token_s[attempt.index] <= world.events.now_s
        if begun:
            world.in_flight -= 1
        else:
            world.columns.first_token_s[attempt.index] = float("nan")
        return not begun

    def _leave_source(self, attempt: Attempt, source: SimNode) -> None:
        world = self._world
        if attempt in source.queue:
            source.queue.remove(attempt)
            world.prefill_waiting[source.cluster] -= 1
            source.queued_s -= attempt.route.prefill_s
        if attempt.prefill_lease is not None and world.caches is not None:
            world.caches.release(source.name, attempt.prefill_lease)
        if source.running is attempt:
            source.running = None
            world.next_prefill(source)

    def _leave_target(self, attempt: Attempt, target: SimNode) -> None:
        world = self._world
        if attempt in target.for_memory:
            target.for_memory.remove(attempt)
            return  # no memory was granted
        world.free_memory(target, attempt.kv_bytes)
