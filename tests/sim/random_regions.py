"""Random deployments of several clusters, and requests for them.

A deployment has 1 to 4 PD clusters and 1 to 4 PrfaaS clusters with the case study's model and
accelerators. Sizes, shares of traffic, lengths and links are drawn; links may be missing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.config import Deployment, parse_deployment
from prfaas.config.strict import parse_toml, read_text
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.workload import TraceRequest, empirical
from prfaas.scheduler.homes.plans import planned_rps
from prfaas.sim.arrivals import Arrivals, poisson_at_homes
from prfaas.studies.network_plans import NetworkStudy

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
MISSING = 0.25  # share of the links that do not exist


def random_deployment(seed: int, raw: dict[str, Any]) -> Deployment:
    rng = np.random.default_rng(seed)
    pds, prfaas = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    shares = rng.dirichlet(np.full(pds, 4.0)).round(4)
    shares[-1] = 1 - shares[:-1].sum()
    clusters: list[dict[str, Any]] = []
    for number in range(pds):
        lengths = {"mu": rng.uniform(9.2, 10.2), "output_tokens": rng.integers(600, 1200).item()}
        cluster = {
            **_cluster(f"pd-{number}", "pd", "h20", int(rng.integers(4, 17))),
            "traffic_share": float(shares[number]),
        }
        clusters.append(cluster if pds == 1 else {**cluster, "workload": raw["workload"] | lengths})
    clusters += [
        _cluster(f"prfaas-{n}", "prfaas", "h200", int(rng.integers(2, 9))) for n in range(prfaas)
    ]
    exists = rng.random((prfaas, pds)) >= MISSING
    exists[np.arange(prfaas), rng.integers(pds, size=prfaas)] = True
    links = [
        {
            "from": f"prfaas-{j}",
            "to": f"pd-{i}",
            "gbps": float(10 ** rng.uniform(0.3, 2)),
            "rtt_ms": float(rng.uniform(5, 80)),
        }
        for j, i in np.argwhere(exists).tolist()
    ]
    return parse_deployment({**raw, "clusters": clusters, "links": links}, CASE_STUDY)


def _cluster(name: str, kind: str, accelerator: str, instances: int) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "accelerator": accelerator,
        "gpus": 8 * instances,
        "gpus_per_instance": 8,
    }


def drawn_case(seconds: float, seed: int) -> tuple[NetworkProblem, Arrivals]:
    """A network whose plan is for the requests that were drawn for it, and these requests: as many
    as the plan serves in `seconds`."""
    deployment = random_deployment(seed, parse_toml(read_text(CASE_STUDY), CASE_STUDY))
    network = NetworkStudy(CASE_STUDY, "exact").network(deployment)
    requests = int(planned_rps(network, "paper") * seconds)
    arrivals = poisson_at_homes(network, 1.0, requests, seed)
    if arrivals.homes is None:
        arrivals = replace(arrivals, homes=np.zeros(len(arrivals), dtype=np.int64))
    return planned_at_homes(network, arrivals), arrivals


def planned_at_homes(network: NetworkProblem, arrivals: Arrivals) -> NetworkProblem:
    """Plans for these requests, at several PD clusters: for the lengths and the number of requests
    that arrive at each of them."""
    assert arrivals.homes is not None, "there are several PD clusters"
    homes = []
    for number, home in enumerate(network.homes):
        here = arrivals.homes == number
        columns = (arrivals.prompt_tokens, arrivals.cached_tokens, arrivals.output_tokens)
        lengths = zip(*(column[here].tolist() for column in columns), strict=True)
        requests = [TraceRequest(prompt - cached, cached, out) for prompt, cached, out in lengths]
        problem = replace(home.problem, workload=empirical(requests))
        homes.append(Home(len(requests) / len(arrivals), problem))
    return NetworkProblem(tuple(homes))
