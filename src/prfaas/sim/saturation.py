"""The rate at which a deployment serves when work never runs out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import best_for, hardware_for
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

# Offered over planned load. Enough for a backlog at every stage throughout; much more would part a
# conversation's turns from the answers they follow, and their prefixes would not be there yet.
_OVERLOAD = 1.1


def saturated_rps(problem: Problem, arrivals: Arrivals, config: SimConfig) -> float:
    """All of `arrivals`, faster than they can be served, over the time until the last first token.
    That counts the slowest stage's whole work: a stage that ran dry early gains nothing. Without
    faults."""
    planned = hardware_for(config.scheduler.policy, problem)
    offered_rps = _OVERLOAD * best_for(planned).capacity_rps
    flooded = arrivals.scaled(offered_rps / arrivals.mean_rps)
    calm = replace(config, links={}, faults=(), timeline=False)
    rows = simulate(problem, flooded, calm).requests
    return len(arrivals) / float(np.nanmax(rows.first_token_s) - rows.arrival_s[0])
