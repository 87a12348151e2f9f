"""PrfaaS-PD and its baselines when work never runs out, beside published ratios where there are.

Each system is flooded for its throughput, then loaded to a share of that for its TTFT: at one
common load the weaker ones would have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.results.service_level import ServiceLevel
from prfaas.sim.results.summary import TtftSpread, summarise
from prfaas.sim.run import simulate
from prfaas.sim.saturation import saturated_rps
from prfaas.studies.plan_comparison import Published, PublishedSystem, read_published
from prfaas.studies.simulation_cases import BASELINES, Case


class Saturated(NamedTuple):
    system: str
    rps: float
    ratio: float  # PrfaaS-PD's throughput over this one's
    published_ratio: float | None
    ttft_s: TtftSpread  # at DEFAULT_UTILISATION of `rps`
    ttft_without_queueing_s: TtftSpread
    published: PublishedSystem


def saturate(
    deployment: Path,
    cases: Mapping[str, Case],
    arrivals: Arrivals,
    levels: Mapping[str, ServiceLevel],
) -> list[Saturated]:
    """The first policy stands for PrfaaS-PD; plans stay as they are. Published figures come from
    the file of the deployment's name with `.published.toml`, where there is one."""
    beside = deployment.with_suffix(".published.toml")
    published = read_published(beside) if beside.exists() else Published(source="")
    first = next(iter(cases))
    systems = {"prfaas_pd": cases[first]}
    systems |= {name: case for name, case in cases.items() if name in BASELINES}
    systems = {
        name: Case(case.problem, replace(case.config, replans=False, timeline=False))
        for name, case in systems.items()
    }
    rps = {name: saturated_rps(c.problem, arrivals, c.config) for name, c in systems.items()}
    rows = []
    for name, (problem, config) in systems.items():
        speed = DEFAULT_UTILISATION * rps[name] / arrivals.mean_rps
        loaded = summarise(
            simulate(problem, arrivals.scaled(speed), config),
            levels.get(name, levels[first]),
        )
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
