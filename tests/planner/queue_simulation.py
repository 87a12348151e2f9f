"""An event simulation of one first-come-first-served queue, independent of the formulas."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def simulate_waits(
    arrival_rps: float, servers: int, service_s: Array, rng: np.random.Generator
) -> Array:
    """Waits of the requests in order of arrival; the first tenth is warm-up and left out."""
    arrivals = np.cumsum(rng.exponential(1 / arrival_rps, len(service_s)))
    free_at = [0.0] * servers
    waits = np.empty(len(service_s))
    for index, (arrival, service) in enumerate(
        zip(arrivals.tolist(), service_s.tolist(), strict=True)
    ):
        start = max(free_at[0], arrival)
        waits[index] = start - arrival
        heapq.heapreplace(free_at, start + service)
    return waits[len(waits) // 10 :]
