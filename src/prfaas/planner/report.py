"""A comparison of deployments as plain data, for `prfaas plan --json`."""

from __future__ import annotations

from typing import Any

from prfaas.planner.comparison import DeploymentComparison, Solution

SYSTEMS = ("prfaas_pd", "homogeneous", "naive", "equal_cost")


def comparison_as_dict(comparison: DeploymentComparison) -> dict[str, Any]:
    systems = {name: _solution_as_dict(getattr(comparison, name)) for name in SYSTEMS}
    return {"reading": comparison.reading, **systems, "ratios": comparison.ratios}


def _solution_as_dict(solution: Solution | None) -> dict[str, Any] | None:
    if solution is None:
        return None
    ttft, theta = solution.ttft, solution.theta
    report = {
        "threshold_tokens": solution.threshold_tokens,
        "n_prfaas": solution.n_prfaas,
        "n_prefill": solution.n_prefill,
        "n_decode": solution.n_decode,
        "theta_rps": {"prfaas": theta.prfaas, "pd_p": theta.pd_p, "pd_d": theta.pd_d},
        "lambda_max_rps": solution.lambda_max_rps,
        "bottleneck": solution.bottleneck,
        "offload_fraction": solution.offload_fraction,
        "egress_gbps": solution.egress_bps / 1e9,
        "ttft_mean_s": ttft and ttft.mean_s,
        "ttft_p50_s": ttft and ttft.p50_s,
        "ttft_p90_s": ttft and ttft.p90_s,
        "ttft_p99_s": ttft and ttft.p99_s,
        "eq7_imbalance": solution.eq7_imbalance,
        "eq8_imbalance": solution.eq8_imbalance,
        "extrapolated": [extrapolation.as_dict() for extrapolation in solution.extrapolations],
    }
    prediction = solution.prediction
    if prediction is not None:
        report |= {
            "load_rps": prediction.load_rps,
            "stable": prediction.stable,
            "stable_at_paper_lambda": solution.stable_at_paper_lambda,
            "prefill_wait_mean_s": prediction.prefill_wait_mean_s,
            "utilisation": {stage.name: stage.utilisation for stage in prediction.stages},
            "slo_capacity_rps": solution.slo_capacity_rps,
        }
    return report
