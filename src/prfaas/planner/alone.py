"""The PD cluster without any PrfaaS cluster: by a split, or with every instance serving alone.

An instance that serves alone prefills and decodes its own requests, without a hand-off. So it works
all of the time, whatever the traffic is: for each request E[T_prefill] seconds, and its share of
the decode steps. No split of whole instances serves more, under the same reading, but many come
close, and a split keeps the speed of the output: where an instance serves alone, each prefill stops
the decode steps between which it runs. A split of one instance serves nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from prfaas.planner.curves import Atoms, WorkCurves, cut_workload
from prfaas.planner.equations import eq5_theta_pd_d
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Problem

# A split that serves this share of what instances alone would serve is the better choice, because
# prefills do not stop its decode steps.
SPLIT_SHARE = 0.9


class LocalOnly(NamedTuple):
    """What a PD cluster serves without some or all PrfaaS clusters, and with how many prefill
    instances."""

    n_prefill: int  # 0 where instances serve alone
    rps: float
    alone: bool  # every instance prefills and decodes its own requests


def local_only(problem: Problem, curves: WorkCurves | None = None) -> LocalOnly:
    """The best that the PD cluster does without PrfaaS clusters. `curves` are those of the
    problem's workload, of either reading; without them the reading is `exact`."""
    return split_or_alone(replace(problem, remotes=()), curves)


def split_or_alone(problem: Problem, curves: WorkCurves | None = None) -> LocalOnly:
    """The best split with the PrfaaS clusters of the problem, or every instance alone."""
    curves = curves or _exact_curves(problem)
    alone = LocalOnly(0, alone_rps(problem, curves), alone=True)
    choice = optimise(problem, curves)
    split = LocalOnly(
        choice.n_prefill, stage_rates(problem, curves, choice).lambda_max, alone=False
    )
    return split if split.rps >= SPLIT_SHARE * alone.rps else alone


def alone_rps(problem: Problem, curves: WorkCurves | None = None) -> float:
    """The requests per second of all instances of the PD cluster if each one prefills and decodes
    its own requests, and PrfaaS clusters take none."""
    curves = curves or _exact_curves(problem)
    pool, decode = problem.local.pool, problem.local.decode
    prefill_s = float(curves.prefill_short_s(pool.profile)[-1])  # the last row offloads nothing
    output_tokens = problem.workload.output_tokens
    decode_rps = eq5_theta_pd_d(1, decode.bs_max, decode.t_decode_s, output_tokens)
    return pool.instances / (prefill_s + 1 / decode_rps)


def _exact_curves(problem: Problem) -> WorkCurves:
    atoms = Atoms(problem.workload, problem.spec)
    return WorkCurves(cut_workload(problem.workload), atoms, "exact")
