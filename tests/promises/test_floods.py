"""One of two PD clusters sends three times its planned rate. The other does not suffer: it keeps
its first tokens per second and nearly its times to them. The live form of the promise is
`python -m prfaas_lab bench flood HOME`."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.config.deployment_file import load_deployment
from prfaas.scheduler.homes.plans import planned_rps
from prfaas.sim.arrivals import Arrivals, draw_at_homes
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate
from prfaas.studies.network_plans import NetworkStudy
from tests.promises.conftest import SEED
from tests.scheduler.homes.networks import ROUND_TRIPS

FILE = Path(__file__).parents[2] / "configs" / "two_by_two.toml"
NETWORK = NetworkStudy(FILE, "exact").network(load_deployment(FILE))
PLANNED_RPS = planned_rps(NETWORK, "paper")
CALM = 0.9  # of the planned rate
FLOOD = 3.0
SECONDS = 900.0
KEPT_RATE = 0.9
KEPT_TTFT = 1.5
# Runs whose requests count together: one run has few beyond the P90.
FEW = ((3,), (4,))
MANY = 20

logger = logging.getLogger(__name__)

# With or without decoding elsewhere, and which PD cluster floods.
CASES = [(True, 0), (True, 1), (False, 0), (False, 1)]


def requests(seed: tuple[int, ...], *factors: float) -> Arrivals:
    """The requests of a PD cluster do not depend on the rate of the other one."""
    drawn = []
    for number, (home, factor) in enumerate(zip(NETWORK.homes, factors, strict=True)):
        rng = np.random.default_rng([*seed, number])
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


class Served(NamedTuple):
    """What the measured window of several runs has of a home."""

    first_tokens: int
    p90_s: float  # of the time to first token


def served(
    policy: str,
    factors: tuple[float, float],
    *,
    elsewhere: bool,
    seeds: tuple[tuple[int, ...], ...],
) -> tuple[Served, ...]:
    """Of each home."""
    rules = SchedulerSection(policy=policy, decode_elsewhere=elsewhere)  # type: ignore[arg-type]
    config = SimConfig(scheduler=rules, round_trips=ROUND_TRIPS)
    begin_s, end_s = SECONDS / 10, SECONDS * 0.95
    counts = [0, 0]
    ttft_s: list[list[np.ndarray]] = [[], []]
    for seed in seeds:
        rows = simulate(NETWORK, requests(seed, *factors), config).requests
        window = (rows.arrival_s > begin_s) & (rows.arrival_s < end_s)
        for home in range(2):
            own = rows.home == home
            first_s = rows.first_token_s[own]
            counts[home] += int(np.sum((first_s > begin_s) & (first_s < end_s)))
            ttft_s[home].append(rows.ttft_s[own & window])
    return tuple(
        Served(count, float(np.percentile(np.concatenate(times), 90)))
        for count, times in zip(counts, ttft_s, strict=True)
    )


served_calm = cache(served)  # both floods are compared with it


def check(policy: str, flooding: int, elsewhere: bool, seeds: tuple[tuple[int, ...], ...]) -> None:
    other = 1 - flooding
    factors = (FLOOD, CALM) if flooding == 0 else (CALM, FLOOD)
    calm = served_calm(policy, (CALM, CALM), elsewhere=elsewhere, seeds=seeds)[other]
    flood = served(policy, factors, elsewhere=elsewhere, seeds=seeds)[other]
    name = NETWORK.homes[other].cluster
    kept, slower = flood.first_tokens / calm.first_tokens, flood.p90_s / calm.p90_s
    said = (
        f"{name} keeps {kept:.1%} of its rate; P90 TTFT {slower:.2f}x, "
        f"{calm.p90_s:.2f} s and then {flood.p90_s:.2f} s"
    )
    logger.info("%s", said)  # --log-cli-level info
    assert kept >= KEPT_RATE and slower <= KEPT_TTFT, said


@pytest.mark.parametrize(
    "elsewhere",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.grid)],
)
@pytest.mark.parametrize("flooding", [0, 1])
@pytest.mark.parametrize("policy", [pytest.param("paper", marks=pytest.mark.grid), "adaptive"])
def test_a_flood_does_not_reach_the_other_pd_cluster(
    policy: str, flooding: int, elsewhere: bool
) -> None:
    check(policy, flooding, elsewhere, FEW)


@pytest.mark.promises
@pytest.mark.timeout(1800)  # twenty runs of a long flood
@pytest.mark.parametrize(("elsewhere", "flooding"), CASES)
@pytest.mark.parametrize("policy", ["adaptive", "paper", "remote"])
def test_a_flood_does_not_reach_the_other_pd_cluster_with_new_seeds(
    policy: str, elsewhere: bool, flooding: int, pytestconfig: pytest.Config
) -> None:
    seed = int(pytestconfig.getoption("seed", SEED))
    logger.info("make promises SEED=%d", seed)
    check(policy, flooding, elsewhere, tuple((seed, number) for number in range(MANY)))
