"""An answer as plain data, for `--json`."""

from __future__ import annotations

import math
from typing import Any

from prfaas.advisor.answer import Answer, Assessed
from prfaas.advisor.certainty import Certainty
from prfaas.advisor.option import Group, Separate
from prfaas.planner.ranges import Range


def answer_as_dict(answer: Answer) -> dict[str, Any]:
    market, verdict = answer.market, answer.verdict
    return {
        "budget_usd_per_hour": market.budget_usd,
        "rate_rps": market.rate_rps,
        "utilisation": market.utilisation,
        "worth_it": verdict.worth_it,
        "reason": verdict.reason,
        "verdict": verdict.text,
        "gain": verdict.gain,
        "pays_from_gbps": verdict.pays_from_gbps,
        "prfaas": [assessed_as_dict(option) for option in answer.prfaas],
        "same_accelerator": None if answer.same is None else assessed_as_dict(answer.same),
        "single": [assessed_as_dict(option) for option in answer.singles],
        "separate": None if answer.separate is None else _separate(answer.separate),
    }


def assessed_as_dict(assessed: Assessed) -> dict[str, Any]:
    option, solution = assessed.option, assessed.solution
    ttft, link = solution.ttft, option.link
    return {
        "here": _group(option.local),
        "there": None if option.remote is None else _group(option.remote),
        "link_gbps": None if link is None else link.gbps,
        "link_usd_per_hour": None if link is None else link.usd_per_hour,
        "link_used_gbps": None if link is None else assessed.used_bps / 1e9,
        "link_needed_gbps": None if link is None else assessed.needed_bps / 1e9,
        "threshold_tokens": solution.threshold_tokens,
        "n_prefill": solution.n_prefill,
        "n_decode": solution.n_decode,
        "offload_fraction": solution.offload_fraction if option.remote is not None else 0.0,
        "rate_rps": option.rate_rps,
        "lambda_max_rps": option.lambda_max_rps,
        "bottleneck": solution.bottleneck,
        "lost_sites": [lost.as_dict() for lost in assessed.lost_sites],
        "ttft_p50_s": None if ttft is None else ttft.p50_s,
        "ttft_p90_s": None if ttft is None else ttft.p90_s,
        "usd_per_hour": option.usd_per_hour,
        "usd_per_million_tokens": assessed.usd_per_million_tokens,
        "usd_per_million_output_tokens": assessed.usd_per_million_output_tokens,
        "gain": assessed.gain,
        "gain_over_single": assessed.over_single,
        "certainty": None if assessed.certainty is None else _certainty(assessed.certainty),
    }


def _separate(separate: Separate) -> dict[str, Any]:
    return {
        "clusters": [_group(group) for group in separate.groups],
        "rate_rps": separate.rate_rps,
        "lambda_max_rps": separate.lambda_max_rps,
        "usd_per_hour": separate.usd_per_hour,
    }


def _group(group: Group) -> dict[str, Any]:
    build = group.place.build
    return {
        "accelerator": group.accelerator,
        "site": group.supply.site,
        "gpus": group.gpus,
        "owned_gpus": group.gpus - group.bought,
        "gpus_per_instance": build.gpus,
        "instances": group.instances,
        "usd_per_gpu_hour": group.supply.buy_usd,
        "usd_per_hour": group.usd_per_hour,
        "times": build.profile.provenance,
    }


def _certainty(certainty: Certainty) -> dict[str, Any]:
    measure = certainty.measure
    return {
        "gain": _range(certainty.gain),
        "wins": certainty.wins,
        "measure": None
        if measure is None
        else {
            "accelerator": measure.accelerator,
            "gpus": measure.gpus,
            "gain_after": _range(measure.after),
        },
    }


def _range(found: Range) -> dict[str, float | None]:
    """JSON has no infinity: a single cluster that may not serve at all leaves a side open."""
    return {key: v if math.isfinite(v) else None for key, v in found._asdict().items()}
