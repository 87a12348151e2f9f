"""`simulate`: a problem, arrivals and assumptions in, a `Result` out. Deterministic."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from prfaas.planner.problem import Problem
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig, link_id
from prfaas.sim.faults import schedule
from prfaas.sim.results.result import Result
from prfaas.sim.world import World

_STEPS = 200  # of progress
_HOPELESS_S = 3600.0  # nothing ended for so long, and nothing is going to change


def simulate(
    problem: Problem,
    arrivals: Arrivals,
    config: SimConfig,
    *,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """`progress` hears the share of requests that have arrived. The run goes on after the last
    arrival until every request has ended, or nothing can happen any more."""
    world = World(problem, arrivals, config)
    schedule(world, float(arrivals.at_s[-1]))
    count = len(arrivals)
    every = max(1, count // _STEPS)
    run_before, arrive = world.events.run_before, world.arrive
    for index, at_s in enumerate(arrivals.at_s.tolist()):
        run_before(at_s)
        arrive(index)
        if progress is not None and index % every == 0:
            progress(index / count)
    _finish(world)
    if progress is not None:
        progress(1.0)
    for link in world.links.values():
        link.settle()
    roles = {remote.pool.cluster: remote.pool.cluster for remote in problem.remotes}
    roles |= {"pd_p": "prefill", "pd_d": "decode"}
    egress = [link_id(problem, index) for index in range(len(problem.remotes))]
    return Result(
        requests=world.columns.requests(),
        series=world.samples.series(
            world.events.now_s, {way: world.links[way].carried_bits for way in egress}
        ),
        roles=world.load.roles(roles),
        stages=world.load.stages(),
        plans=tuple(world.plans),
        copies=world.copies,
        copied_bytes=world.copied_bytes,
        spans=world.spans,
        window_s=(world.load.start_s, world.load.stop_s),
    )


def _finish(world: World) -> None:
    """Until every request has ended. A deployment that can never answer some (all that prefill are
    dead for good) would tick for ever, so a long silence after the last upheaval ends it, too."""
    events, config = world.events, world.config
    changes = [change.at_s for schedule in config.links.values() for change in schedule]
    recoveries = [fault.until_s for fault in config.faults if fault.until_s < inf]
    heard_s = max([events.now_s, *changes, *recoveries])
    left = world.in_flight
    while world.in_flight and events.now_s < heard_s + _HOPELESS_S:
        events.run_before(events.now_s + config.report_interval_s)
        if world.in_flight != left:
            left, heard_s = world.in_flight, max(heard_s, events.now_s)
