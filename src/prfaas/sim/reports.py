"""Periodic reports of simulated nodes and links, as the router receives them: a little late.

The reports pause while no request is in flight, so that an idle stretch of a trace costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.scheduler.board import NodeReport
from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.view import LinkId
from prfaas.sim.nodes import SimNode
from prfaas.sim.results.recording import link_reports
from prfaas.types import LinkStats, NodeId

if TYPE_CHECKING:
    from prfaas.sim.world import World

QUIET_UTILISATION = 0.5  # far below any utilisation at which a verdict could change


class Reports:
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
        links = link_reports(world)
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
