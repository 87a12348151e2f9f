"""Fits the estimator's constants to observed times. Pure.

The fit minimises a robust loss of ln(estimate / truth), so that a single odd figure counts little.
Each constant has a weak prior, worth about one observation that deviates by ROBUST_SIZE: where
the points say nothing, as with one accelerator left out, a constant stays physical.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from prfaas.estimator.efficiency import Efficiencies, ErrorParts, FixedTimes
from prfaas.estimator.observations import Observation

Array = npt.NDArray[np.float64]
Selection = Callable[[Observation], bool]

# Deviations up to this size count with their square, larger ones about linearly.
ROBUST_SIZE = 0.15
# A campaign of n observations counts like n ** (1 - 2 * SHARED) independent ones.
SHARED = 0.25


class Prior(NamedTuple):
    """A constant's value before the fit, and the deviation of its logarithm that counts as much as
    an observation that deviates by ROBUST_SIZE."""

    value: float
    deviation: float


# In the order of `_design`. Fixed times and the costs that only a fit can tell are left free within
# a factor of three; shares of a peak are known better.
PRIORS = {
    "paper": Prior(0.35, 1.0),
    "sglang": Prior(0.15, 1.0),
    "vllm": Prior(0.05, 1.0),
    "matrix": Prior(1 / 0.6, 0.3),  # large products on recent GPUs: 0.5 to 0.8 of the peak
    "softmax": Prior(1 / 1e15, 1.0),
    "memory": Prior(1 / 0.8, 0.15),  # streaming kernels: 0.7 to 0.9 of the peak
    "routed": Prior(30.0, 1.0),
    "exchange": Prior(1 / 0.3, 0.7),
    "layers": Prior(5e-5, 1.0),
    "expert_layers": Prior(3e-5, 1.0),
}


def fit(observed: Sequence[Observation], leaving_out: Selection | None = None) -> Efficiencies:
    """Constants fitted to the observations whose use is to be fitted, without those that
    `leaving_out` selects. The errors are those of `errors_of` over the same observations."""
    used = [
        seen
        for seen in observed
        if seen.use == "fit" and not (leaving_out is not None and leaving_out(seen))
    ]
    return constants_of(used)


def constants_of(used: Sequence[Observation]) -> Efficiencies:
    design, offset = _design(used)
    seconds = np.array([seen.seconds for seen in used])
    sizes = Counter(seen.group for seen in used)
    weight = np.array([sizes[seen.group] ** -SHARED for seen in used]) / ROBUST_SIZE
    start = np.log([prior.value for prior in PRIORS.values()])
    deviations = np.array([prior.deviation for prior in PRIORS.values()])

    def residuals(logs: Array) -> Array:
        estimate = design @ np.exp(logs) + offset
        scaled = np.log(estimate / seconds) * weight
        # The square of this is the pseudo-Huber loss.
        robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
        return np.concatenate([robust, (logs - start) / deviations])

    found = np.exp(least_squares(residuals, start, xtol=1e-10).x).tolist()
    value = dict(zip(PRIORS, found, strict=True))
    none = ErrorParts(model=0.0, accelerator=0.0, pair=0.0, length=0.0)
    return Efficiencies(
        prefill_fixed_s=FixedTimes(value["paper"], value["sglang"], value["vllm"]),
        matrix=1 / value["matrix"],
        softmax_flops=1 / value["softmax"],
        memory=1 / value["memory"],
        routed_bytes=value["routed"],
        exchange=1 / value["exchange"],
        decode_layer_s=value["layers"],
        decode_expert_layer_s=value["expert_layers"],
        prefill_error=none,
        decode_error=none,
    )


def _design(used: Sequence[Observation]) -> tuple[Array, Array]:
    """Columns in the order of PRIORS, and the part of the estimate that has no constant."""
    rows, offset = [], []
    for seen in used:
        parts = seen.parts
        fixed = [float(seen.fixed == name) for name in ("paper", "sglang", "vllm")]
        offset.append(parts.attention)
        rows.append(
            [
                *fixed,
                parts.matrix,
                parts.softmax,
                parts.memory,
                parts.routed,
                parts.exchange,
                parts.layers,
                parts.expert_layers,
            ]
        )
    return np.array(rows), np.array(offset)
