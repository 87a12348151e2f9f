"""The rate at which a deployment serves when work never runs out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import best_for
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

# Offered load: every stage has a backlog throughout, and the last arrival comes half-way through.
_OVERLOAD = 2.0


def saturated_rps(problem: Problem, arrivals: Arrivals, config: SimConfig) -> float:
    """All of `arrivals` at twice the planned capacity, over the time until the last first token.
    That counts the slowest stage's whole work: a stage that ran dry early gains nothing. Without
    faults, and with the plan as it is."""
    offered_rps = _OVERLOAD * best_for(problem).capacity_rps
    flooded = arrivals.scaled(offered_rps / arrivals.mean_rps)
    calm = replace(config, links={}, faults=(), replans=False, timeline=False)
    rows = simulate(problem, flooded, calm).requests
    return len(arrivals) / float(np.nanmax(rows.first_token_s) - rows.arrival_s[0])
