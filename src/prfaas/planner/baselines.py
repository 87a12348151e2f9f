"""The deployments PrfaaS-PD is compared with (paper, section 4.3). Each is another Problem.

homogeneous   one PD cluster with the same number of GPUs, all of the local cluster's type
equal_cost    one PD cluster with as many GPUs of that type as the deployment's cost pays for
naive         every prefill is remote, every local instance decodes, there is no threshold
"""

from __future__ import annotations

from dataclasses import replace

from prfaas.planner.problem import Problem


def homogeneous(problem: Problem) -> Problem | None:
    """The homogeneous baseline. None if it has fewer than two instances: one must prefill and one
    decode."""
    return _pd_only(problem, sum(pool.gpus for pool in problem.pools))


def equal_cost(problem: Problem) -> Problem | None:
    """The equal-cost baseline. None if it has fewer than two instances, or a price is unknown."""
    spend = 0.0
    for pool in problem.pools:
        if pool.usd_per_gpu_hour is None:
            return None
        spend += pool.gpus * pool.usd_per_gpu_hour
    local_price = problem.local.pool.usd_per_gpu_hour
    assert local_price is not None, "the local pool is one of the pools"
    return _pd_only(problem, int(spend / local_price + 1e-9))


def naive(problem: Problem) -> Problem | None:
    """The naive baseline. None if there is no remote cluster."""
    if not problem.remotes:
        return None
    return replace(problem, fixed_threshold=0, local=replace(problem.local, fixed_prefill=0))


def _pd_only(problem: Problem, gpus: int) -> Problem | None:
    pool = problem.local.pool
    instances = gpus // pool.gpus_per_instance
    if instances < 2:
        return None
    local = replace(problem.local, pool=replace(pool, instances=instances), fixed_prefill=None)
    return replace(problem, remotes=(), local=local, fixed_threshold=None)
