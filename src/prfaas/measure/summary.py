"""Summarises a load: what the clients measured, and whether the generator kept up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.measure.open_loop import RequestResult

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """The distribution of a time, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class LoadSummary:
    requests: int
    completed: int
    errors: dict[str, int]  # by kind
    lasted_s: float  # from the first arrival to the end of the last response
    offered_rps: float
    completed_rps: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not report it
    ttft_s: LatencySummary | None  # None: no request got that far
    per_token_s: LatencySummary | None
    took_s: LatencySummary | None
    late_s: LatencySummary | None  # how late the generator sent requests


def summarise_load(results: Sequence[RequestResult]) -> LoadSummary:
    good = [one for one in results if one.error is None]
    first_s = min((one.at_s for one in results), default=0.0)
    last_s = max((one.at_s for one in results), default=0.0)
    end_s = max((one.at_s + one.late_s + one.took_s for one in results), default=0.0)
    lasted_s = end_s - first_s
    reported = [one.cached_tokens for one in good if one.cached_tokens is not None]
    arriving_s = last_s - first_s
    return LoadSummary(
        requests=len(results),
        completed=len(good),
        errors=dict(Counter(one.error for one in results if one.error is not None)),
        lasted_s=lasted_s,
        # n arrivals have n - 1 gaps.
        offered_rps=(len(results) - 1) / arriving_s if arriving_s > 0 else 0.0,
        completed_rps=len(good) / lasted_s if lasted_s > 0 else 0.0,
        output_tokens_per_s=sum(one.output_tokens for one in good) / lasted_s if lasted_s else 0.0,
        prompt_tokens=sum(one.prompt_tokens for one in good),
        cached_tokens=sum(reported) if reported else None,
        ttft_s=summarise_latencies(one.ttft_s for one in good),
        per_token_s=summarise_latencies(one.per_token_s for one in good),
        took_s=summarise_latencies(one.took_s for one in good),
        late_s=summarise_latencies(one.late_s for one in results),
    )


def summarise_latencies(values: Iterable[float | None]) -> LatencySummary | None:
    known = np.array([value for value in values if value is not None], dtype=float)
    if not known.size:
        return None
    p50, p90, p99 = (float(value) for value in np.quantile(known, QUANTILES))
    return LatencySummary(float(known.mean()), p50, p90, p99, float(known.max()))
