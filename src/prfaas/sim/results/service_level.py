"""The service level that goodput counts: time to the first token, and time per token after it.

Without a stated goal, the limit of a request's TTFT is a multiple of its TTFT on an idle
deployment: short prompts must be fast, long prompts may take longer. Every policy on one deployment
is held to the same service level, that of `paper` without queueing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.homes.plans import as_network, planned_rps
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

Array = npt.NDArray[np.float64]

IDLE_TTFT_SLACK = 3.0
# The idle deployment is simulated at this share of its capacity. Waits are subtracted, and at this
# load transfers hardly ever share a link. A lower load would only make the run longer.
_IDLE_LOAD = 0.2


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The limits of TTFT and of time per output token. A good request meets both."""

    ttft_s: Array | float  # one limit for each request, or one for all
    tpot_s: float


def idle_service_level(
    problem: Problem | NetworkProblem, arrivals: Arrivals, config: SimConfig, tpot_s: float
) -> ServiceLevel:
    """Measures the limits in a run of the same requests at low load, without faults or replans."""
    calm = replace(
        config,
        scheduler=msgspec.structs.replace(config.scheduler, policy="paper"),
        links={},
        faults=(),
        replans=False,
        timeline=False,
        moments=0,
    )
    idle_rps = _IDLE_LOAD * planned_rps(as_network(problem), "paper")
    rows = simulate(problem, arrivals.scaled(idle_rps / arrivals.mean_rps), calm).requests
    idle_s = rows.ttft_s - rows.wait_s - rows.slot_wait_s
    return ServiceLevel(IDLE_TTFT_SLACK * idle_s, tpot_s)
