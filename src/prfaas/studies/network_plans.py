"""Plans deployments with several PD clusters from their files."""

from __future__ import annotations

from pathlib import Path

from prfaas.config import Deployment
from prfaas.errors import InputError
from prfaas.planner.curves import Reading
from prfaas.planner.network.comparison import NetworkComparison, compare
from prfaas.planner.network.problem import NetworkProblem, build_network
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.studies.problem_files import Study


class NetworkStudy(Study):
    """A study of deployments with any number of PD clusters. With one PD cluster, `Study.plan`
    tells more: TTFT, and the stages of the paper's tables."""

    def __init__(self, file: Path, reading: Reading) -> None:
        super().__init__(file, reading)
        self._network_planner = NetworkPlanner(reading)

    def plan_network(self, deployment: Deployment) -> NetworkComparison:
        return compare(self.network(deployment), self._reading, self._network_planner)

    @property
    def programmes_solved(self) -> int:
        """Linear programmes so far."""
        return self._network_planner.programmes_solved

    def network(self, deployment: Deployment) -> NetworkProblem:
        catalog = self.catalog(deployment)
        try:
            spec = self._spec(deployment.model, catalog)
            workloads = {
                cluster.name: self._workload(deployment.workload_of(cluster))
                for cluster in deployment.of_kind("pd")
            }
            return build_network(deployment, catalog, spec, workloads)
        except InputError as error:
            raise error.in_file(self._file) from None
