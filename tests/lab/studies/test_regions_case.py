from __future__ import annotations

from pathlib import Path

import numpy as np

from prfaas.config import load_deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.scaling import smaller_deployment
from prfaas.measure.open_loop import RequestResult
from prfaas.scheduler.homes.plans import solve_network
from prfaas.sim.arrivals import Arrivals, poisson_at_homes
from prfaas_lab.studies.regions_case import arrivals_at, merged_first_tokens_s, regions_case

TWO_BY_TWO = Path(__file__).parents[3] / "configs" / "two_by_two.toml"
SCALES = Scales(time=2.0, bytes=1 / 128, output=1 / 32)


def outcome(at_s: float, ttft_s: float | None) -> RequestResult:
    return RequestResult(at_s, 0.0, 1.0, ttft_s, None, 10, None, 1, None)


def test_requests_go_to_their_homes_and_their_tokens_come_back_in_order() -> None:
    tokens = np.arange(1, 5, dtype=np.int64)
    homes = np.array([1, 0, 1, 0])
    arrivals = Arrivals(np.array([1.0, 2.0, 3.0, 4.0]), tokens, tokens * 0, tokens, homes=homes)
    east, west = arrivals_at(arrivals, 0), arrivals_at(arrivals, 1)
    assert east.at_s.tolist() == [2.0, 4.0] and west.prompt_tokens.tolist() == [1, 3]
    found = merged_first_tokens_s(
        arrivals,
        [
            (east, [outcome(4.0, 0.5), outcome(2.0, None)]),
            (west, [outcome(1.0, 0.25), outcome(3.0, 2.0)]),
        ],
    )
    assert found.tolist()[::2] == [1.25, 5.0] and found[3] == 4.5 and np.isnan(found[1])


def test_the_smaller_deployment_uses_every_link_to_a_pd_cluster(tmp_path: Path) -> None:
    """Otherwise the comparison would say nothing about a link."""
    smaller = smaller_deployment(load_deployment(TWO_BY_TWO), 0.5)
    assert [cluster.instances for cluster in smaller.clusters] == [6, 3, 2, 2]
    fabric = smaller.link("east", "east")
    assert fabric is not None and fabric.gbps == 800
    case = regions_case(smaller, TWO_BY_TWO, tmp_path, SCALES)
    assert case.homes == ["east", "west"]
    plan = solve_network(case.problem)
    assert len(plan.flows) == 4 and all(flow.utilisation > 0.05 for flow in plan.flows)
    assert all(home.n_prefill and home.n_decode for home in plan.homes)
    arrivals = poisson_at_homes(case.problem, plan.rate_rps, 200, seed=0)
    assert arrivals.homes is not None
    parts = [arrivals_at(arrivals, number) for number in range(2)]
    assert sum(map(len, parts)) == 200 and all(len(part) > 50 for part in parts)
