"""`simulate`: a problem, arrivals and assumptions in, a `Result` out. Deterministic."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig
from prfaas.sim.faults import schedule_changes
from prfaas.sim.recorder import Recorder
from prfaas.sim.results.result import ClusterName, Result
from prfaas.sim.world import World

_PROGRESS_STEPS = 200
# A run ends when no request has ended for this long and no change is scheduled any more.
_HOPELESS_S = 3600.0


def simulate(
    problem: Problem | NetworkProblem,
    arrivals: Arrivals,
    config: SimConfig,
    *,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """`progress` is called with the share of requests that have arrived. The run continues after
    the last arrival until every request has ended, or until no event can end the rest."""
    return run(World(problem, arrivals, config), arrivals, progress=progress)


def run(
    world: World,
    arrivals: Arrivals,
    *,
    progress: Callable[[float], None] | None = None,
    hopeless_s: float = _HOPELESS_S,
) -> Result:
    """The same for a world that the caller has made for these arrivals."""
    schedule_changes(world, float(arrivals.at_s[-1]))
    count = len(arrivals)
    every = max(1, count // _PROGRESS_STEPS)
    run_before, arrive = world.events.run_before, world.arrive
    recorder = None
    if world.config.moments:
        recorder = world.recorder = Recorder(world, count, float(arrivals.at_s[-1]))
        recorder.take(world.link_reports())
    for index, at_s in enumerate(arrivals.at_s.tolist()):
        run_before(at_s)
        arrive(index)
        if progress is not None and index % every == 0:
            progress(index / count)
    _finish(world, hopeless_s)
    if progress is not None:
        progress(1.0)
    for link in world.links.values():
        link.settle()
    pools = world.network.prfaas_pools
    roles = {name: name for name in pools} | world.stages.names.roles
    clusters = [ClusterName(name, "pd") for name in world.homes.names]
    return Result(
        requests=world.columns.requests(),
        clusters=(*clusters, *(ClusterName(name, "prfaas") for name in pools)),
        link_bps={link: world.paths[link].bps for link in world.egress},
        series=world.samples.series(
            world.events.now_s, {name: world.links[name].carried_bits for name in world.egress}
        ),
        roles=world.stages.roles(roles),
        stages=world.stages.stages(),
        plans=tuple(world.homes.changes),
        copies=world.copies,
        copied_bytes=world.copied_bytes,
        alone=world.alone.served,
        alone_s=world.alone.seconds,
        spans=world.spans,
        window_s=(world.stages.start_s, world.stages.stop_s),
        recording=None if recorder is None else recorder.finish(),
    )


def _finish(world: World, hopeless_s: float) -> None:
    """Runs until every request has ended. A deployment that can never answer some requests (every
    prefill node is lost for good) would report for ever. Therefore the run also ends when no
    request has ended for a long time after the last scheduled change."""
    events, config = world.events, world.config
    changes = [change.at_s for timed in config.links.values() for change in timed]
    recoveries = [fault.until_s for fault in config.faults if fault.until_s < inf]
    progress_s = max([events.now_s, *changes, *recoveries])
    left = world.in_flight
    while world.in_flight and events.now_s < progress_s + hopeless_s:
        events.run_before(events.now_s + config.report_interval_s)
        if world.in_flight != left:
            left, progress_s = world.in_flight, max(progress_s, events.now_s)
