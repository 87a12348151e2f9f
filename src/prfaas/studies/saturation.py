"""Throughput and TTFT of PrfaaS-PD and its baselines at saturation, beside published ratios if any.

A constant backlog gives each system's throughput. A load of a fixed share of that throughput gives
its TTFT: at one common load, the weaker systems would be overloaded and have no stable TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.results.result import Result
from prfaas.sim.results.service_level import ServiceLevel
from prfaas.sim.results.summary import TtftSpread, summarise
from prfaas.sim.run import simulate
from prfaas.sim.saturation import saturated_rps
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import HERE, Workers
from prfaas.studies.plan_comparison import Published, PublishedSystem, read_published
from prfaas.studies.simulation_cases import BASELINES, Case


class Saturated(NamedTuple):
    """The figures of one system at saturation."""

    system: str
    rps: float
    ratio: float  # PrfaaS-PD's throughput over this system's
    published_ratio: float | None
    ttft_s: TtftSpread  # at DEFAULT_UTILISATION of `rps`
    ttft_without_queueing_s: TtftSpread
    published: PublishedSystem


def saturate(
    deployment: Path,
    cases: Mapping[str, Case],
    arrivals: Arrivals,
    levels: Mapping[str, ServiceLevel],
    workers: Workers = HERE,
    expected_s: float = math.inf,
) -> list[Saturated]:
    """Simulates every system at saturation. The first policy represents PrfaaS-PD. Plans do not
    change. Published figures of NAME.toml come from NAME.published.toml, if that file exists."""
    beside = deployment.with_suffix(".published.toml")
    published = read_published(beside) if beside.exists() else Published(source="")
    first = next(iter(cases))
    systems = {"prfaas_pd": cases[first]}
    systems |= {name: case for name, case in cases.items() if name in BASELINES}
    systems = {
        name: Case(case.problem, replace(case.config, replans=False, timeline=False, moments=0))
        for name, case in systems.items()
    }
    found = run_all(partial(_saturated, arrivals), systems, workers, expected_s=expected_s)
    rps = {name: rate for name, (rate, _) in found.items()}
    rows = []
    for name, (_, result) in found.items():
        loaded = summarise(result, levels.get(name, levels[first]))
        rows.append(
            Saturated(
                name,
                rps[name],
                rps["prfaas_pd"] / rps[name],
                published.ratios.get(f"prfaas_over_{name}"),
                loaded.ttft_s,
                loaded.ttft_without_queueing_s,
                getattr(published, name),
            )
        )
    return rows


def _saturated(arrivals: Arrivals, case: Case) -> tuple[float, Result]:
    """The throughput at saturation, and a run at a share of it."""
    problem, config = case
    rps = saturated_rps(problem, arrivals, config)
    speed = DEFAULT_UTILISATION * rps / arrivals.mean_rps
    return rps, simulate(problem, arrivals.scaled(speed), config)


def saturated_as_dict(rows: list[Saturated]) -> dict[str, Any]:
    return {
        row.system: {
            "throughput_rps": row.rps,
            "prfaas_over_this": row.ratio,
            "published_ratio": row.published_ratio,
            "ttft_mean_s": row.ttft_s.mean,
            "ttft_p90_s": row.ttft_s.p90,
            "ttft_mean_without_queueing_s": row.ttft_without_queueing_s.mean,
            "ttft_p90_without_queueing_s": row.ttft_without_queueing_s.p90,
            "published_ttft_mean_s": row.published.ttft_mean_s,
            "published_ttft_p90_s": row.published.ttft_p90_s,
        }
        for row in rows
    }
