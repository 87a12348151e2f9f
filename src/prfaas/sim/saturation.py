"""The rate at which a deployment serves under a constant backlog."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.homes.plans import as_network, planned_rps
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

# Offered load over planned capacity. It is enough for a backlog at every stage throughout the run.
# With much more, the turns of a conversation would arrive before the turns that they follow are
# served, and their prefixes would not be cached yet.
_OVERLOAD = 1.1


def saturated_rps(
    problem: Problem | NetworkProblem, arrivals: Arrivals, config: SimConfig
) -> float:
    """Returns the number of arrivals over the time until the last first token, when requests arrive
    faster than they can be served. This counts the whole work of the slowest stage: a stage that
    becomes idle early does not raise the rate. The run is without faults."""
    offered_rps = _OVERLOAD * planned_rps(as_network(problem), config.scheduler.policy)
    flooded = arrivals.scaled(offered_rps / arrivals.mean_rps)
    calm = replace(config, links={}, faults=(), timeline=False, moments=0)
    rows = simulate(problem, flooded, calm).requests
    return len(arrivals) / float(np.nanmax(rows.first_token_s) - rows.arrival_s[0])
