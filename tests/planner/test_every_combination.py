"""Every model of the catalog on every pair of accelerators gives a plan or a reasoned refusal."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable

import pytest

from prfaas.catalog import Catalog
from prfaas.config import parse_deployment
from prfaas.errors import InputError
from prfaas.estimator.sizes import smallest_instance
from prfaas.planner.comparison import DeploymentComparison, Planner
from prfaas.planner.instance_times import Lengths, PlannedModel, TimesFinder
from prfaas.planner.problem import build_problem
from prfaas.planner.ranges import merged
from prfaas.planner.workload import lognormal

CATALOG = Catalog.builtin()
# Prompts as in the case study, in fewer atoms: thousands of plans share them.
WORKLOAD = merged(lognormal(9.9, 1.0, 128, 131_072, output_tokens=1024), 256)
LENGTHS = Lengths.of(WORKLOAD)
INSTANCES = 4


class Planned:
    """Plans one model on pairs of accelerators. They share estimates and curves."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.spec = CATALOG.model(model).spec()
        self.times = TimesFinder(
            CATALOG, PlannedModel.of_catalog(CATALOG, model, self.spec), LENGTHS
        )
        self.planner: Planner | None = None

    def gpus(self, accelerator: str) -> int:
        instance = self.times.instance(accelerator, 1)
        lengths = (LENGTHS.longest, LENGTHS.context)
        return smallest_instance(instance, *lengths, across_domains=True).gpus

    def plan(self, prfaas: str, pd: str) -> DeploymentComparison:
        deployment = parse_deployment(
            {
                "model": {"name": self.model},
                "workload": {
                    "kind": "lognormal",
                    **{"mu": 9.9, "sigma": 1.0, "min_tokens": 128, "max_tokens": 131072},
                    "output_tokens": 1024,
                },
                "slo": {"output_tokens_per_s": 5},
                "clusters": [self.cluster("prfaas", prfaas), self.cluster("pd", pd)],
                "links": [{"from": "prfaas", "to": "pd", "gbps": 100}],
            },
            "deployment.toml",
        )
        problem = build_problem(deployment, CATALOG, self.spec, WORKLOAD, self.times)
        if self.planner is None:
            self.planner = Planner(problem, "paper")
        return self.planner.compare(problem)

    def cluster(self, kind: str, accelerator: str) -> dict[str, object]:
        gpus = self.gpus(accelerator)
        return {
            **{"name": kind, "kind": kind, "accelerator": accelerator},
            **{"gpus": INSTANCES * gpus, "gpus_per_instance": gpus},
        }


def check(combinations: Iterable[tuple[str, str, str]]) -> tuple[int, int]:
    """Plans each combination: how many are planned, and how many are refused with a reason."""
    models: dict[str, Planned] = {}
    planned = refused = 0
    for model, prfaas, pd in combinations:
        try:
            plan = models.setdefault(model, Planned(model)).plan(prfaas, pd)
        except InputError as error:
            reasons = ("do not fit into", "the catalog does not have")
            assert any(reason in error.problem for reason in reasons), (model, prfaas, pd, error)
            assert error.fix
            refused += 1
        else:
            best = plan.prfaas_pd
            assert math.isfinite(best.lambda_max_rps) and best.lambda_max_rps > 0
            assert best.n_prefill + best.n_decode == INSTANCES
            assert best.ttft is not None and best.ttft.mean_s > 0
            planned += 1
    return planned, refused


def accelerators_that_hold(model: str) -> int:
    planned, count = Planned(model), 0
    for accelerator in CATALOG.accelerators:
        with contextlib.suppress(InputError):
            count += planned.gpus(accelerator) > 0
    return count


def combinations() -> list[tuple[str, str, str]]:
    return list(itertools.product(CATALOG.models, CATALOG.accelerators, CATALOG.accelerators))


def test_a_sample_of_combinations() -> None:
    planned, refused = check(combinations()[17::81])
    assert planned + refused >= 60
    assert planned > refused > 0


@pytest.mark.slow
def test_every_combination() -> None:
    planned, refused = check(combinations())
    assert planned + refused == 17 * 17 * 17
    assert planned == sum(accelerators_that_hold(model) ** 2 for model in CATALOG.models)
