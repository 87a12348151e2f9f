from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from prfaas.planner import baselines
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import poisson
from prfaas.sim.config import RateChange, SimConfig, link_id
from prfaas.sim.saturation import saturated_rps
from tests.planner.builders import problem

SMALL = problem(prfaas=2, pd=4, bps=1e9, bs_max=40)


def routed(policy: str) -> SimConfig:
    base = SimConfig()
    return replace(base, scheduler=msgspec.structs.replace(base.scheduler, policy=policy))


@pytest.mark.parametrize("system", ["prfaas_pd", "homogeneous"])
def test_a_flood_is_served_at_the_planned_capacity(system: str) -> None:
    given = SMALL if system == "prfaas_pd" else baselines.homogeneous(SMALL)
    assert given is not None
    arrivals = poisson(given.workload, 1.0, 3000, seed=3)
    found = saturated_rps(given, arrivals, routed("paper" if given.remotes else "local"))
    assert found == pytest.approx(find_optimum(given).capacity_rps, rel=0.04)


def test_neither_the_given_speed_nor_stress_matters() -> None:
    arrivals = poisson(SMALL.workload, 1.0, 500, seed=3)
    calm = saturated_rps(SMALL, arrivals, routed("paper"))
    cut = replace(routed("paper"), links={link_id(SMALL, 0): (RateChange(0.0, 0.0),)})
    assert saturated_rps(SMALL, arrivals.scaled(7.0), cut) == pytest.approx(calm)
