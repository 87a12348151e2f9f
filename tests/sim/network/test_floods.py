"""One of two PD clusters sends three times its planned rate. The other does not suffer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.config.deployment_file import load_deployment
from prfaas.scheduler.homes.plans import planned_rps
from prfaas.sim.arrivals import Arrivals, draw_at_homes
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate
from prfaas.studies.network_plans import NetworkStudy
from tests.scheduler.homes.networks import ROUND_TRIPS

FILE = Path(__file__).parents[3] / "configs" / "two_by_two.toml"
NETWORK = NetworkStudy(FILE, "exact").network(load_deployment(FILE))
PLANNED_RPS = planned_rps(NETWORK, "paper")
CALM = 1.0  # of the planned rate
FLOOD = 3.0
SECONDS = 900.0


def requests(*factors: float) -> Arrivals:
    """The requests of a PD cluster do not depend on the rate of the other one."""
    drawn = []
    for number, (home, factor) in enumerate(zip(NETWORK.homes, factors, strict=True)):
        rng = np.random.default_rng([1, number])
        rate = factor * home.share * PLANNED_RPS
        at_s = np.cumsum(rng.exponential(1 / rate, int(rate * SECONDS)))
        drawn.append(draw_at_homes(NETWORK, at_s, np.full(len(at_s), number), rng))
    order = np.argsort(np.concatenate([one.at_s for one in drawn]), kind="stable")
    return Arrivals(
        at_s=np.concatenate([one.at_s for one in drawn])[order],
        prompt_tokens=np.concatenate([one.prompt_tokens for one in drawn])[order],
        cached_tokens=np.concatenate([one.cached_tokens for one in drawn])[order],
        output_tokens=np.concatenate([one.output_tokens for one in drawn])[order],
        homes=np.concatenate([one.homes for one in drawn if one.homes is not None])[order],
    )


def served(arrivals: Arrivals, policy: str, home: int, *, elsewhere: bool) -> tuple[float, float]:
    """First tokens per second, and the 90th percentile of the time to them."""
    rules = SchedulerSection(policy=policy, decode_elsewhere=elsewhere)  # type: ignore[arg-type]
    rows = simulate(NETWORK, arrivals, SimConfig(scheduler=rules, round_trips=ROUND_TRIPS)).requests
    own = rows.home == home
    window = (rows.arrival_s > SECONDS / 10) & (rows.arrival_s < SECONDS * 0.95)
    first_s = rows.first_token_s[own]
    rate = np.mean((first_s > SECONDS / 10) & (first_s < SECONDS * 0.95)) * len(first_s)
    return float(rate), float(np.percentile(rows.ttft_s[own & window], 90))


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("flooding", [0, 1])
@pytest.mark.parametrize("policy", ["paper", "adaptive"])
def test_a_flood_does_not_reach_the_other_pd_cluster(
    policy: str, flooding: int, elsewhere: bool
) -> None:
    factors = [CALM, CALM]
    calm = served(requests(*factors), policy, 1 - flooding, elsewhere=elsewhere)
    factors[flooding] = FLOOD
    rate, p90_s = served(requests(*factors), policy, 1 - flooding, elsewhere=elsewhere)
    assert rate > 0.9 * calm[0]
    assert p90_s < 1.5 * calm[1]
