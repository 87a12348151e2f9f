"""What a deployment serves when a PrfaaS cluster is lost, or drained, or its link is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from prfaas.planner.alone import alone_rps, split_or_alone
from prfaas.planner.curves import Atoms, WorkCurves, cut_workload
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Problem


@dataclass(frozen=True, slots=True)
class LeftHome:
    """A PD cluster that has lost a PrfaaS cluster. Its nodes change their roles, or each of them
    prefills and decodes its own requests (`alone`)."""

    cluster: str
    n_prefill: int  # 0 where every node is alone
    n_decode: int
    more_prefill: int  # prefill nodes that were decode nodes before; below 0: the other way round
    alone: bool

    @property
    def in_words(self) -> str:
        if self.alone:
            one = "the only" if self.n_prefill + self.n_decode == 1 else "every"
            return f"{one} node prefills and decodes its own requests"
        if not self.more_prefill:
            return "all nodes keep their roles"
        before, after = ("decode", "prefill") if self.more_prefill > 0 else ("prefill", "decode")
        count = abs(self.more_prefill)
        if count == 1:
            return f"one {before} node becomes a {after} node"
        return f"{count} {before} nodes become {after} nodes"


@dataclass(frozen=True, slots=True)
class LostSite:
    """What is served without one PrfaaS cluster."""

    cluster: str
    rps: float
    full_rps: float  # with the PrfaaS cluster
    homes: tuple[LeftHome, ...]  # the PD clusters that it prefills for

    @property
    def in_words(self) -> str:
        share = self.rps / self.full_rps
        figures = f"{self.rps:.2f} requests/s of {self.full_rps:.2f} ({share:.0%})"
        if share > 1:  # whole instances made a bad split, and none is needed where all are alone
            figures = f"{self.rps:.2f} requests/s, no less than with it"
        if len(self.homes) == 1:
            words = self.homes[0].in_words
        else:
            words = "; ".join(f"at {home.cluster} {home.in_words}" for home in self.homes)
        return f"Without {self.cluster} or its link: {figures}: {words}."

    def as_dict(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "rate_rps": self.rps,
            "share": self.rps / self.full_rps,
            "pd_clusters": [
                {
                    "cluster": home.cluster,
                    "split": {"prefill": home.n_prefill, "decode": home.n_decode},
                    "alone": home.alone,
                }
                for home in self.homes
            ],
        }


@dataclass(frozen=True, slots=True)
class Served:
    """What a deployment with one PD cluster serves, and what is left of it without each PrfaaS
    cluster."""

    rps: float
    home: LeftHome
    lost_sites: tuple[LostSite, ...]

    @property
    def in_words(self) -> str:
        """A sentence each."""
        split = (_nodes(self.home.n_prefill, "prefill"), _nodes(self.home.n_decode, "decode"))
        how = f"{' and '.join(split)} at {self.home.cluster}"
        if self.home.alone:
            how = self.home.in_words
        first = f"Planned for {self.rps:.2f} requests/s: {how}."
        return "\n".join([first, *(lost.in_words for lost in self.lost_sites)])


def served(problem: Problem) -> Served:
    """With the best split, by the exact reading; where no split serves, with every node alone."""
    atoms = Atoms(problem.workload, problem.spec)
    curves = WorkCurves(cut_workload(problem.workload), atoms, "exact")
    choice = optimise(problem, curves)
    rps = stage_rates(problem, curves, choice).lambda_max
    alone = rps <= 0
    if alone:
        rps = alone_rps(problem, curves)
    home = left_home(problem, choice.n_prefill, choice.n_prefill, alone=alone)
    return Served(rps, home, lost_sites(problem, curves, rps, choice.n_prefill))


def _nodes(count: int, role: str) -> str:
    return f"{count or 'no'} {role} node{'' if count == 1 else 's'}"


def left_home(problem: Problem, n_prefill: int, before: int, *, alone: bool) -> LeftHome:
    """`n_prefill` of the nodes prefill now, and `before` did."""
    pool = problem.local.pool
    return LeftHome(pool.cluster, n_prefill, pool.instances - n_prefill, n_prefill - before, alone)


def lost_sites(
    problem: Problem, curves: WorkCurves, full_rps: float, n_prefill: int
) -> tuple[LostSite, ...]:
    """The loss of each PrfaaS cluster. `full_rps` and `n_prefill` are those of the plan, and
    `curves` those that it was solved with."""
    found = []
    for lost in problem.remotes:
        others = tuple(remote for remote in problem.remotes if remote is not lost)
        left = split_or_alone(replace(problem, remotes=others), curves)
        home = left_home(problem, left.n_prefill, n_prefill, alone=left.alone)
        found.append(LostSite(lost.pool.cluster, left.rps, full_rps, (home,)))
    return tuple(found)
