"""The service level that goodput counts: time to the first token, and per token after it.

Without a goal of its own a request is promised so many times what it takes on an idle deployment:
short prompts must be fast, long ones may take their time. Every policy on one deployment is held to
the same promise, that of `paper` when nobody is in the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import best_for
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

Array = npt.NDArray[np.float64]

IDLE_TTFT_SLACK = 3.0
# The idle deployment is seen at this share of its capacity. Waits are left out, and transfers then
# hardly ever meet; much less would only make the run longer.
_IDLE_LOAD = 0.2


@dataclass(frozen=True, slots=True)
class Promise:
    """Both parts must hold for a request to count as good."""

    ttft_s: Array | float  # one for each request, or one for all
    tpot_s: float


def idle_promise(problem: Problem, arrivals: Arrivals, config: SimConfig, tpot_s: float) -> Promise:
    """From a run of the same requests with time to spare, without faults or plan changes."""
    calm = replace(
        config,
        scheduler=msgspec.structs.replace(config.scheduler, policy="paper"),
        links={},
        faults=(),
        replans=False,
        timeline=False,
    )
    idle_rps = _IDLE_LOAD * best_for(problem).capacity_rps
    rows = simulate(problem, arrivals.scaled(idle_rps / arrivals.mean_rps), calm).requests
    idle_s = rows.ttft_s - rows.wait_s - rows.slot_wait_s
    return Promise(IDLE_TTFT_SLACK * idle_s, tpot_s)
