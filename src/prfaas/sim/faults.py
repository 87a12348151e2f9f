"""Scheduled changes of a simulated deployment: lost nodes, changing bandwidth, new plans.

A lost node or link ends every attempt that depends on it. A request without its first token starts
again. A request whose stream breaks after the first token ends there with an error, as in the
gateway.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

from prfaas.errors import InputError
from prfaas.scheduler.homes.plans import home_name
from prfaas.scheduler.long_term.replan_homes import replan_homes
from prfaas.scheduler.view import LinkId
from prfaas.sim.attempt import Attempt
from prfaas.sim.config import (
    ClusterFault,
    DrainFault,
    Fault,
    LinkFault,
    NodeFault,
    SlowFault,
)
from prfaas.sim.nodes import SimNode
from prfaas.sim.world import World
from prfaas.types import ClusterId, NodeId


def schedule_changes(world: World, until_s: float) -> None:
    """Schedules every fault, rate change and replanning up to `until_s`."""
    changes = _ScheduledChanges(world)
    events = world.events
    for index, fault in enumerate(world.config.faults):
        _check(fault, world, f"faults.{index}")
        begin: Callable[[Any], None]
        end: Callable[[Any], None]
        match fault:
            case LinkFault():
                begin, end = changes.lose_link, changes.recover_link
            case SlowFault():
                begin, end = changes.slow_down, changes.speed_up
            case DrainFault():
                begin, end = changes.drain, changes.use_again
            case _:
                begin, end = changes.lose_nodes, changes.recover_nodes
        events.at(fault.at_s, begin, fault)
        if fault.until_s < float("inf"):
            events.at(fault.until_s, end, fault)
    for link_id, rates in world.config.links.items():
        for rate in rates:
            events.at(rate.at_s, changes.change_rate, (link_id, rate.share))
    if world.config.replans:
        every_s = world.config.scheduler.replan.every_s
        for count in range(1, int(until_s / every_s) + 1):
            events.at(count * every_s, changes.replan)


def _check(fault: Fault, world: World, where: str) -> None:
    known: list[str]
    match fault:
        case NodeFault(node) | SlowFault(node):
            named, known = str(node), list(world.nodes)
        case ClusterFault(cluster) | DrainFault(cluster):
            named, known = str(cluster), list(world.prefill_waiting)
        case LinkFault(link):
            named, known = " -> ".join(link), [" -> ".join(one) for one in world.links]
    if named not in known:
        raise InputError(
            f"the deployment has no {named!r}",
            where=where,
            fix=f"name one of: {', '.join(sorted(known))}",
        )
    if not 0 <= fault.at_s < fault.until_s:
        raise InputError(
            f"a fault from {fault.at_s:g} s until {fault.until_s:g} s",
            where=where,
            fix="let it begin at 0 s or later, and end after its beginning",
        )


class _ScheduledChanges:
    """Faults may overlap: a node or link returns when the last of its faults has ended."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._faults: Counter[NodeId | LinkId] = Counter()  # that have begun and not ended
        self._drains: Counter[ClusterId] = Counter()  # the same of orders to drain
        self._factors: defaultdict[NodeId, list[float]] = defaultdict(list)  # of slow nodes
        self._shares: dict[LinkId, float] = {}  # of the configured bandwidth, where it has changed

    def change_rate(self, change: tuple[LinkId, float]) -> None:
        link_id, share = change
        self._shares[link_id] = share
        self._set_rate(link_id)

    def _set_rate(self, link_id: LinkId) -> None:
        share = 0.0 if self._faults[link_id] else self._shares.get(link_id, 1.0)
        self._world.links[link_id].set_bps(self._world.paths[link_id].bps * share)
        self._world.count_capacity()

    def replan(self, _: object) -> None:
        world = self._world
        now = world.events.now_s
        used = [node for node in world.nodes.values() if node.alive and node.in_use]
        live = Counter(node.cluster for node in used)
        windows = {}
        for home, plan in world.homes.plans.items():
            names = {node.name for node in used if node.cluster == home}
            remotes = tuple(live[ClusterId(r.pool.cluster)] for r in plan.problem.remotes)
            windows[home] = world.traffic[home].window(now, remotes, names)
        shares = {home_name(home): home.share for home in world.network.homes}
        new = replan_homes(windows, world.homes.plans, shares)
        if not new:
            return
        world.homes.change_plans(new, now)
        for home, plan in new.items():
            for name in windows[home].live_local:
                node = world.nodes[name]
                if not node.switching:
                    stays = node.role == plan.roles[name]
                    world.board.assign(name, node.role, usable=stays)
                    world.switch_if_drained(node)

    # Lost nodes and clusters ----------------------------------------------------------------------

    def _nodes(self, fault: NodeFault | ClusterFault) -> list[SimNode]:
        if isinstance(fault, NodeFault):
            return [self._world.nodes[fault.node]]
        return [node for node in self._world.nodes.values() if node.cluster == fault.cluster]

    def lose_nodes(self, fault: NodeFault | ClusterFault) -> None:
        world = self._world
        nodes = self._nodes(fault)
        self._faults.update(node.name for node in nodes)
        lost = [node for node in nodes if node.alive]
        # All of them first: no request starts again on a node that is lost at the same time.
        for node in lost:
            node.alive = False
            world.board.assign(node.name, node.role, usable=False)
        again = [index for node in lost for index in self._lose(node)]
        if lost:
            world.count_capacity()
        self._start_again(again)

    def _lose(self, node: SimNode) -> list[int]:
        """Ends every attempt at the node. Returns the requests that start again."""
        world = self._world
        lost = [
            *node.prefills,
            *(attempt for attempt in node.decodes if attempt not in node.prefills),
        ]
        again = [attempt.index for attempt in lost if self._end(attempt, node)]
        world.prefill_waiting[node.cluster] -= len(node.queue)
        world.slot_waiting -= len(node.for_slot)
        node.queue.clear()
        node.running = None
        node.for_slot.clear()
        node.for_memory.clear()
        node.batch.clear()
        node.free_kv_bytes = world.config.decode_kv_bytes
        if world.caches is not None:
            world.caches.leave(node.name)
        world.board.forget_work(node.name)
        return again

    def recover_nodes(self, fault: NodeFault | ClusterFault) -> None:
        world = self._world
        for node in self._nodes(fault):
            self._faults[node.name] -= 1
            if self._faults[node.name]:
                continue
            node.alive = True
            plan = world.homes.plans.get(node.cluster)
            if plan is not None:
                node.role = plan.roles[node.name]
            if world.caches is not None:
                world.caches.join(node.name)
            world.board.assign(node.name, node.role, usable=node.in_use)
        world.count_capacity()

    def _start_again(self, indices: list[int]) -> None:
        for index in indices:
            self._world.columns.retries[index] += 1
            self._world.try_route(index)

    # Drained clusters -----------------------------------------------------------------------------

    def drain(self, fault: DrainFault) -> None:
        """Work that was dispatched stays where it is."""
        self._drains[fault.cluster] += 1
        self._use(fault.cluster)

    def use_again(self, fault: DrainFault) -> None:
        self._drains[fault.cluster] -= 1
        self._use(fault.cluster)

    def _use(self, cluster: ClusterId) -> None:
        world = self._world
        plan = world.homes.plans.get(cluster)
        for node in world.nodes.values():
            if node.cluster != cluster:
                continue
            node.in_use = not self._drains[cluster]
            stays = plan is None or node.role == plan.roles[node.name]
            usable = node.in_use and node.alive and stays and not node.switching
            world.board.assign(node.name, node.role, usable=usable)

    # Slow nodes -----------------------------------------------------------------------------------

    def slow_down(self, fault: SlowFault) -> None:
        self._factors[fault.node].append(fault.factor)
        self._world.nodes[fault.node].slowness = prod(self._factors[fault.node])

    def speed_up(self, fault: SlowFault) -> None:
        self._factors[fault.node].remove(fault.factor)
        self._world.nodes[fault.node].slowness = prod(self._factors[fault.node])

    # Lost links -----------------------------------------------------------------------------------

    def lose_link(self, fault: LinkFault) -> None:
        """The router learns at once that the connections are gone, as its members do."""
        world = self._world
        self._faults[fault.link] += 1
        self._set_rate(fault.link)
        link, (_, target) = world.links[fault.link], fault.link
        world.board.record_link_report(fault.link, link.report(target, 0.0))
        cut = [
            attempt
            for node in world.nodes.values()
            if node.cluster in fault.link
            for attempt in node.prefills
            if self._uses(attempt, fault.link)
        ]
        self._start_again([attempt.index for attempt in cut if self._end(attempt, None)])

    def _uses(self, attempt: Attempt, link: LinkId) -> bool:
        """Whether the hand-off of an attempt, or a copy that it waits for, takes the link."""
        taken = attempt.route
        if (taken.cluster, taken.decode_cluster) == link:
            return True
        nodes = self._world.nodes
        return attempt.copies_left > 0 and any(
            (nodes[copy.source].cluster, nodes[copy.target].cluster) == link
            for copy in taken.copies
        )

    def recover_link(self, fault: LinkFault) -> None:
        self._faults[fault.link] -= 1
        self._set_rate(fault.link)

    # Ends of attempts -----------------------------------------------------------------------------

    def _end(self, attempt: Attempt, lost: SimNode | None) -> bool:
        """Ends an attempt, because of a lost node or link. Returns whether the request starts
        again."""
        world = self._world
        attempt.is_over = True
        chosen = attempt.route
        source, target = world.nodes[chosen.prefill], world.nodes[chosen.decode]
        source.prefills.pop(attempt, None)
        target.decodes.pop(attempt, None)
        if attempt.landed:
            world.board.record_end(attempt.dispatch)
        else:
            world.board.record_failure(attempt.dispatch, world.events.now_s)
        if attempt.transfer is not None:
            world.links[chosen.cluster, chosen.decode_cluster].cancel(attempt.transfer)
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
