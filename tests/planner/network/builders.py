"""Random deployments of several clusters with few distinct lengths, and small ones made by hand."""

from __future__ import annotations

import numpy as np

from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.problem import Local, Path, Pool, Problem, Remote
from prfaas.planner.profile import DecodeRate, PrefillProfile, PrefillTime
from prfaas.planner.workload import Workload
from tests.planner.builders import SPEC


def random_network(rng: np.random.Generator, homes: int, remotes: int) -> NetworkProblem:
    """Every PrfaaS cluster reaches at least one PD cluster; other paths may be missing. Splits,
    thresholds and workloads may be fixed, shared or different."""
    pools = [_pool(rng, f"prfaas-{j}", 5) for j in range(remotes)]
    reach = rng.random((homes, remotes)) < 0.75
    for j in range(remotes):
        reach[rng.integers(homes), j] = True
    shares = rng.dirichlet(np.full(homes, 3.0))
    common = random_workload(rng)
    made = []
    for i in range(homes):
        workload = common if rng.random() < 0.4 else random_workload(rng)
        paths = [
            Remote(pools[j], Path(10 ** rng.uniform(6, 9), 0.01))
            for j in range(remotes)
            if reach[i, j]
        ]
        # A PD cluster without a PrfaaS cluster needs an instance for prefill.
        pool = _pool(rng, f"pd-{i}", 6, least=1 if paths else 2)
        decode = DecodeRate(int(rng.integers(1, 20)), 0.02)
        fixed = None
        if rng.random() < 0.15 and pool.instances > 1:
            fixed = int(rng.integers(1, pool.instances))
        local = Local(pool, decode, None, fixed)
        made.append(Home(float(shares[i]), Problem(SPEC, workload, tuple(paths), local)))
    return NetworkProblem(tuple(made))


def random_workload(rng: np.random.Generator) -> Workload:
    count = int(rng.integers(1, 13))
    new = np.sort(rng.choice(np.geomspace(20, 10_000, 60).round(), count, replace=False))
    cached = np.zeros(count)
    if rng.random() < 0.3:
        cached = rng.integers(0, 5_000, count).astype(float)
    weight = rng.dirichlet(np.ones(count))
    return Workload(new, cached, weight, output_tokens=float(rng.integers(20, 120)))


def random_profile(rng: np.random.Generator) -> PrefillProfile:
    """From nearly linear to nearly quadratic in the length."""
    linear, quadratic = 10 ** rng.uniform(-4.5, -3), 10 ** rng.uniform(-9, -6.5)
    points = [
        PrefillTime(n, 0, 0.02 + linear * n + quadratic * n * n) for n in (20, 500, 3_000, 10_000)
    ]
    return PrefillProfile(points, provenance="measured: test")


def _pool(rng: np.random.Generator, name: str, most: int, least: int = 1) -> Pool:
    instances = int(rng.integers(least, most + 1))
    return Pool(name, name, instances, 1, random_profile(rng), 1.0)
