"""Plans deployments with several PD clusters from their files."""

from __future__ import annotations

from pathlib import Path

from prfaas.config import Deployment
from prfaas.config.deployment import Cluster
from prfaas.errors import InputError
from prfaas.planner.curves import Reading
from prfaas.planner.network.comparison import NetworkComparison, compare
from prfaas.planner.network.plan import NetworkPlan
from prfaas.planner.network.problem import NetworkProblem, build_network
from prfaas.planner.network.shown_curves import RateCurve, WithProgress, rate_curves
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Problem
from prfaas.studies.problem_files import Study


class NetworkStudy(Study):
    """A study of deployments with any number of PD clusters. With one PD cluster, `Study.plan`
    tells more: TTFT, and the stages of the paper's tables."""

    def __init__(self, file: Path, reading: Reading) -> None:
        super().__init__(file, reading)
        self._network_planner = NetworkPlanner(reading)

    def plan_network(self, deployment: Deployment) -> NetworkComparison:
        problem = self.network(deployment)
        try:
            return compare(problem, self._reading, self._network_planner)
        except InputError as error:
            raise error.in_file(self._file) from None

    def rate_curves(
        self, problem: NetworkProblem, plan: NetworkPlan, with_progress: WithProgress
    ) -> list[RateCurve]:
        """The total rate with other thresholds and splits of each PD cluster."""
        return rate_curves(self._network_planner, problem, plan, with_progress)

    @property
    def programmes_solved(self) -> int:
        """Linear programmes so far."""
        return self._network_planner.programmes_solved

    def network(self, deployment: Deployment) -> NetworkProblem:
        return build_network(deployment, lambda pd: self.problem_at(pd, deployment))

    def problem_at(self, pd: Cluster, deployment: Deployment) -> Problem:
        """The problem of one PD cluster, with its own traffic."""
        try:
            workload = self._workload(deployment.workload_of(pd))
        except InputError as error:
            raise error.in_file(self._file) from None
        return self.problem(deployment, workload, at=pd)


def deployment_problem(file: Path, deployment: Deployment) -> Problem | NetworkProblem:
    """The problem of a deployment, exactly read: that of its PD cluster or, where there are
    several, of all of them."""
    if len(deployment.of_kind("pd")) > 1:
        return NetworkStudy(file, "exact").network(deployment)
    return Study(file, "exact").problem(deployment)
