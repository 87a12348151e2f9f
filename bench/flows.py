"""CPU and wall time of a plan of several clusters: 8 PD and 6 PrfaaS clusters with 10,000 GPUs.

    python -m prfaas_lab bench flows [--repeats N] [--seed N]

Every PD cluster has a workload of its own with a length for every token count, and 40 of the 48
links exist. The plan includes its baselines and what one more instance or Gbit/s would add. Goal:
at most 10 s under either reading. There is no other planner to compare with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.config import Deployment, parse_deployment
from prfaas.config.strict import parse_toml, read_text
from prfaas.planner.curves import Reading
from prfaas.studies.network_plans import NetworkStudy

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
GOAL_S = 10.0
PD_CLUSTERS, PRFAAS_CLUSTERS = 8, 6
PD_INSTANCES, PRFAAS_INSTANCES, GPUS_PER_INSTANCE = 850, 400, 8
MISSING_LINKS = 8


def large_deployment(seed: int = 0) -> Deployment:
    """The case study's model and accelerators; sizes, shares, lengths and links are drawn."""
    rng = np.random.default_rng(seed)
    raw = parse_toml(read_text(CASE_STUDY), CASE_STUDY)
    shares = rng.dirichlet(np.full(PD_CLUSTERS, 4.0)).round(4)
    shares[-1] = 1 - shares[:-1].sum()
    clusters: list[dict[str, Any]] = []
    pd_sizes = divided(PD_INSTANCES, 0.5 * shares + 0.5 * rng.dirichlet(np.full(PD_CLUSTERS, 4.0)))
    for number in range(PD_CLUSTERS):
        lengths = {"mu": rng.uniform(9.2, 10.2), "output_tokens": rng.integers(600, 1200).item()}
        clusters.append(
            {
                "name": f"pd-{number}",
                "kind": "pd",
                "accelerator": "h20",
                "gpus": pd_sizes[number] * GPUS_PER_INSTANCE,
                "gpus_per_instance": GPUS_PER_INSTANCE,
                "traffic_share": float(shares[number]),
                "workload": {**raw["workload"], **lengths},
            }
        )
    prfaas_sizes = divided(PRFAAS_INSTANCES, rng.dirichlet(np.full(PRFAAS_CLUSTERS, 4.0)))
    clusters += [
        {
            "name": f"prfaas-{number}",
            "kind": "prfaas",
            "accelerator": "h20" if number == 0 else "h200",
            "gpus": prfaas_sizes[number] * GPUS_PER_INSTANCE,
            "gpus_per_instance": GPUS_PER_INSTANCE,
        }
        for number in range(PRFAAS_CLUSTERS)
    ]
    pairs = [(j, i) for j in range(PRFAAS_CLUSTERS) for i in range(PD_CLUSTERS)]
    missing = set(rng.choice(len(pairs), MISSING_LINKS, replace=False).tolist())
    links = [
        {"from": f"prfaas-{j}", "to": f"pd-{i}", "gbps": 10 ** rng.uniform(1, 2.7), "rtt_ms": 30.0}
        for number, (j, i) in enumerate(pairs)
        if number not in missing
    ]
    return parse_deployment({**raw, "clusters": clusters, "links": links}, CASE_STUDY)


def divided(total: int, parts: Any) -> list[int]:
    """Whole numbers in these proportions, at least 2 each, that sum to the total."""
    sizes = [max(2, int(total * part)) for part in parts / np.sum(parts)]
    sizes[0] += total - sum(sizes)
    return sizes


def measured(reading: Reading, seed: int) -> dict[str, Any]:
    deployment = large_deployment(seed)
    study = NetworkStudy(CASE_STUDY, reading)
    wall, cpu = time.perf_counter(), time.process_time()
    comparison = study.plan_network(deployment)
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "linear_programmes": study.programmes_solved,
        "rate_rps": comparison.plan.rate_rps,
        "gap": comparison.plan.gap,
        "binding": len(comparison.plan.binding),
        "ratios": comparison.ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="Runs per reading (default 3).")
    parser.add_argument("--seed", type=int, default=0, help="Of the deployment (default 0).")
    options = parser.parse_args()
    gpus = sum(cluster.gpus for cluster in large_deployment(options.seed).clusters)
    report: dict[str, Any] = {"goal_s": GOAL_S, "repeats": options.repeats, "gpus": gpus}
    readings: tuple[Reading, ...] = ("paper", "exact")
    for reading in readings:
        runs = [measured(reading, options.seed) for _ in range(options.repeats)]
        medians = {
            key: round(statistics.median(run[key] for run in runs), 3)
            for key in ("wall_s", "cpu_s")
        }
        report[reading] = {**runs[0], **medians}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
