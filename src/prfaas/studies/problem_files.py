"""Reads the files of a deployment and builds the planning problem from them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from prfaas.catalog import Catalog
from prfaas.catalog.hf_config import ConfigGeometry
from prfaas.catalog.hf_file import read_hf_config, read_hf_shape
from prfaas.catalog.shape import ModelShape
from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, Lognormal, Mixture, ModelSection, WorkloadSection
from prfaas.config.trace import read_trace
from prfaas.errors import InputError
from prfaas.estimator.instance import CHUNK_TOKENS, with_weights
from prfaas.kvspec import KVSpec, build_spec
from prfaas.planner.comparison import DeploymentComparison, Planner
from prfaas.planner.curves import Reading
from prfaas.planner.instance_times import Lengths, PlannedModel, TimesFinder
from prfaas.planner.problem import Problem, build_problem, build_problem_at
from prfaas.planner.ranges import PlanRanges, plan_ranges
from prfaas.planner.workload import Part, Workload, empirical, lognormal, mixture, uncached_requests


class Study:
    """Builds and plans the problems of deployments from one file (a sweep has many).

    It reads and prepares the parts that they share, usually workload and model, only once."""

    def __init__(self, file: Path, reading: Reading) -> None:
        self._file = file
        self._reading: Reading = reading
        self._catalogs: dict[tuple[str, ...], Catalog] = {}
        self._workloads: dict[bytes, Workload] = {}
        self._finders: dict[tuple[bytes, tuple[str, ...], Lengths], TimesFinder] = {}
        self._planners: dict[tuple[int, KVSpec], Planner] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Planners belong to ids of workloads, which mean nothing in another process.
        return {**self.__dict__, "_planners": {}}

    def plan(self, deployment: Deployment, load_rps: float | None = None) -> DeploymentComparison:
        return self.plan_problem(self.problem(deployment), load_rps)

    def plan_problem(self, problem: Problem, load_rps: float | None = None) -> DeploymentComparison:
        """The plan of a problem that this study has made."""
        return self.planner(problem).compare(problem, load_rps)

    def ranges(self, deployment: Deployment, load_rps: float | None = None) -> PlanRanges | None:
        """None if nothing of the plan is estimated."""
        return plan_ranges(self.problem(deployment), self._reading, load_rps)

    def planner(self, problem: Problem) -> Planner:
        key = (
            id(problem.workload),
            problem.spec,
        )  # the study keeps its workloads, so ids stay unique
        if key not in self._planners:
            self._planners[key] = Planner(problem, self._reading)
        return self._planners[key]

    @cached_property
    def _builtin(self) -> Catalog:
        return Catalog.builtin()

    def catalog(self, deployment: Deployment) -> Catalog:
        files = tuple(deployment.catalog)
        if files not in self._catalogs:
            beside = [self._file.parent / name for name in files]
            self._catalogs[files] = self._builtin.extended(beside)
        return self._catalogs[files]

    def problem(
        self,
        deployment: Deployment,
        workload: Workload | None = None,
        at: Cluster | None = None,
    ) -> Problem:
        """The problem of a deployment, with its own traffic unless `workload` is given. `at` is the
        PD cluster, where there are several."""
        catalog = self.catalog(deployment)
        try:
            spec = self._spec(deployment.model, catalog)
            if workload is None:
                workload = self._workload(deployment.workload)
            lengths = Lengths.of(workload)
            key = (msgspec.json.encode(deployment.model), tuple(deployment.catalog), lengths)
            if key not in self._finders:
                self._finders[key] = self._finder(deployment.model, catalog, spec, lengths)
            times = self._finders[key]
            if at is None:
                return build_problem(deployment, catalog, spec, workload, times)
            return build_problem_at(at, deployment, catalog, spec, workload, times)
        except InputError as error:
            raise error.in_file(self._file) from None

    def _spec(self, model: ModelSection, catalog: Catalog) -> KVSpec:
        if model.config is not None:
            return config_spec(read_hf_config(self._file.parent / model.config), model.kv_dtype)
        try:
            return catalog.model(model.name).spec(model.kv_dtype)
        except InputError as error:
            key = "kv_dtype" if model.name in catalog.models else "name"
            raise InputError(error.problem, where=f"model.{key}", fix=error.fix) from None

    def _finder(
        self, section: ModelSection, catalog: Catalog, spec: KVSpec, lengths: Lengths
    ) -> TimesFinder:
        def shape() -> ModelShape:
            found = self._shape(section, catalog)
            return found if section.weights is None else with_weights(found, section.weights)

        chunk_tokens = section.chunk_tokens or CHUNK_TOKENS
        quantised = section.weights is not None and shape() != self._shape(section, catalog)
        model = PlannedModel(
            section.name, spec, shape, chunk_tokens, quantised, section.engine_class
        )
        own = [record for record in catalog.profiles if record not in self._builtin.profiles]
        return TimesFinder(catalog, model, lengths, own=own)

    def _shape(self, section: ModelSection, catalog: Catalog) -> ModelShape:
        if section.config is not None:
            return read_hf_shape(self._file.parent / section.config, section.name)
        return catalog.model(section.name).model_shape()

    def _workload(self, section: WorkloadSection) -> Workload:
        key = msgspec.json.encode(section)
        if key not in self._workloads:
            self._workloads[key] = self._read_workload(section)
        return self._workloads[key]

    def _read_workload(self, section: WorkloadSection) -> Workload:
        match section:
            case Lognormal(mu, sigma, low, high, output, cached):
                return lognormal(mu, sigma, low, high, output_tokens=output, cached_tokens=cached)
            case Mixture(components, output):
                parts = [
                    Part(
                        c.weight,
                        lognormal(
                            c.mu,
                            c.sigma,
                            c.min_tokens,
                            c.max_tokens,
                            output_tokens=output,
                            cached_tokens=c.cached_tokens,
                        ),
                    )
                    for c in components
                ]
                return mixture(parts, output_tokens=output)
        path = self._file.parent / section.path
        try:
            rows = read_trace(path, section.block_tokens)
            requests = uncached_requests(rows, section.block_tokens)
        except InputError as error:
            raise error.in_file(path) from None
        return empirical(requests, output_tokens=section.output_tokens)


def config_spec(config: ConfigGeometry, kv_dtype: str | None) -> KVSpec:
    return build_spec(
        config.geometries, kv_dtype=kv_dtype or config.kv_dtype, state_dtype=config.state_dtype
    )
