"""Drives `replan` as a shell does: requests come, finish and are observed, plans are made."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from prfaas.config.deployment import ReplanSection
from prfaas.planner.problem import Problem
from prfaas.planner.workload import Workload
from prfaas.scheduler.long_term.replan import replan
from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.scheduler.plan import Plan, first_plan
from prfaas.types import ClusterId, NodeId


@dataclass
class Loop:
    problem: Problem
    rules: ReplanSection = field(default_factory=ReplanSection)
    seed: int = 0
    now_s: float = 0.0
    paces: Mapping[ClusterId, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.problem.local.pool.instances
        self.nodes = [NodeId(f"pd-{index}") for index in range(count)]
        self.plan: Plan = first_plan(self.problem, self.nodes, self.rules)
        self.plans = [self.plan]
        self.conversions: list[NodeId] = []
        self.traffic = TrafficHistory(0.0, self.rules.window_s)
        self.rng = np.random.default_rng(self.seed)

    def serve(
        self,
        workload: Workload,
        seconds: float,
        rps: float = 3.0,
        *,
        live_remotes: tuple[int, ...] | None = None,
        live_local: Set[NodeId] | None = None,
    ) -> None:
        """Poisson traffic of one kind, with a look at the plan every `every_s`."""
        if live_remotes is None:
            live_remotes = tuple(remote.pool.instances for remote in self.problem.remotes)
        end = self.now_s + seconds
        while self.now_s < end:
            until = self.now_s + self.rules.every_s
            count = self.rng.poisson(rps * self.rules.every_s)
            which = self.rng.choice(len(workload.new), count, p=workload.weight)
            for at, k in zip(self._times(until, count), which, strict=True):
                new, cached = int(workload.new[k]), int(workload.cached[k])
                self.traffic.observe(at, new, cached, round(workload.output_tokens), 0.0)
            self.now_s = until
            alive = live_local or set(self.nodes)
            window = self.traffic.window(until, live_remotes, alive, self.paces)
            new_plan = replan(window, self.plan)
            if new_plan is not None:
                before = self.plan.roles
                self.conversions += [n for n in self.nodes if new_plan.roles[n] != before[n]]
                self.plan = new_plan
                self.plans.append(new_plan)

    def _times(self, until_s: float, count: int) -> list[float]:
        return sorted(self.rng.uniform(self.now_s, until_s, count).tolist())
