"""Fits the estimator's constants to observed times. Pure.

The fit minimises a robust loss of ln(estimate / truth), so that a single odd figure counts little.
Each constant has a weak prior, worth about one observation that deviates by ROBUST_SIZE: where
the points say nothing, as with one accelerator left out, a constant stays physical.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from scipy.optimize import least_squares

from prfaas.estimator.efficiency import Efficiencies, ErrorParts, FixedTimes
from prfaas.estimator.times import coefficients
from prfaas_lab.fitting.observations import Observation

Array: TypeAlias = npt.NDArray[np.float64]
Selection: TypeAlias = Callable[[Observation], bool]
Kind: TypeAlias = Literal["prefill", "decode"]
Hidden: TypeAlias = Literal["model", "accelerator", "model and accelerator"]

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
    "hidden": Prior(50.0, 1.0),
    "exchange": Prior(1 / 0.4, 0.5),
    "layers": Prior(5e-5, 1.0),
    "expert_layers": Prior(3e-5, 1.0),
}


def fit(observed: Sequence[Observation], leaving_out: Selection | None = None) -> Efficiencies:
    """Constants fitted to the observations whose use is to be fitted, without those that
    `leaving_out` selects, and the error that the same observations show."""
    used = usable(observed, leaving_out)
    constants = constants_of(used)
    return replace(
        constants,
        prefill_error=error_parts(unseen_errors(used, "prefill", constants)),
        decode_error=error_parts(unseen_errors(used, "decode", constants)),
        fitted_accelerators=sorted({seen.accelerator for seen in used}),
        unfitted_accelerator_error=_unfitted_error(observed, constants),
    )


def usable(
    observed: Sequence[Observation], leaving_out: Selection | None = None
) -> list[Observation]:
    return [
        seen
        for seen in observed
        if seen.use == "fit" and not (leaving_out is not None and leaving_out(seen))
    ]


def constants_of(used: Sequence[Observation], start: Efficiencies | None = None) -> Efficiencies:
    """Constants fitted to all of `used`. A `start` near the result saves time."""
    design, offset = _design(used)
    seconds = np.array([seen.seconds for seen in used])
    sizes = Counter(seen.group for seen in used)
    weight = np.array([sizes[seen.group] ** -SHARED for seen in used]) / ROBUST_SIZE
    center = np.log([prior.value for prior in PRIORS.values()])
    deviations = np.array([prior.deviation for prior in PRIORS.values()])

    def residuals(logs: Array) -> Array:
        scaled = np.log((design @ np.exp(logs) + offset) / seconds) * weight
        # The square of this is the pseudo-Huber loss.
        robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
        return np.concatenate([robust, (logs - center) / deviations])

    def slopes(logs: Array) -> Array:
        terms = design * np.exp(logs)
        estimate = terms.sum(axis=1) + offset
        scaled = np.log(estimate / seconds) * weight
        root = np.sqrt(1 + scaled**2)
        # d sqrt(2 (root - 1)) / d scaled, which is 1 where nothing deviates.
        bend = np.sqrt((root + 1) / 2) / root
        return np.concatenate(
            [terms * (bend * weight / estimate)[:, None], np.diag(1 / deviations)]
        )

    first = center if start is None else np.log(_values(start))
    found = np.exp(least_squares(residuals, first, jac=slopes, xtol=1e-8).x).tolist()
    return _constants(dict(zip(PRIORS, found, strict=True)))


def unseen_errors(
    used: Sequence[Observation],
    kind: Kind,
    start: Efficiencies,
    hidden: Hidden = "model and accelerator",
) -> list[tuple[Observation, float]]:
    """ln(estimate / truth) of each observation of this kind, by constants that have seen no
    observation of its model, of its accelerator, or of either."""
    errors = []
    keys = {_key(seen, hidden) for seen in used if seen.kind == kind}
    for key in sorted(keys):
        rest = [seen for seen in used if not _shares(seen, key, hidden)]
        constants = constants_of(rest, start)
        errors += [
            (seen, seen.log_error(constants))
            for seen in used
            if seen.kind == kind and _key(seen, hidden) == key
        ]
    return errors


def error_parts(errors: Sequence[tuple[Observation, float]]) -> ErrorParts:
    """Splits errors into independent parts, by the mean products of errors that share a model or an
    accelerator. A campaign is what one source measured of one model on one accelerator; campaigns
    of the same pair differ by engine. A systematic error counts as error: products are not
    centered."""
    campaigns: dict[tuple[str, str, str], list[float]] = {}
    for seen, error in errors:
        key = (seen.model, seen.accelerator, seen.source)
        campaigns.setdefault(key, []).append(error)
    means = {key: fmean(values) for key, values in campaigns.items()}
    within = [variance(values) for values in campaigns.values() if len(values) > 1]
    length = fmean(within) if within else 0.0
    # The mean of a campaign has this much of the variance within it.
    noise = fmean(length / len(values) for values in campaigns.values())
    whole = fmean(mean**2 for mean in means.values()) - noise
    model = _mean_product(means, same=0, different=1)
    accelerator = _mean_product(means, same=1, different=0)
    return ErrorParts(
        model=math.sqrt(model),
        accelerator=math.sqrt(accelerator),
        pair=math.sqrt(max(0.0, whole - model - accelerator)),
        length=math.sqrt(length),
    )


def _mean_product(means: dict[tuple[str, str, str], float], same: int, different: int) -> float:
    """Mean product of the errors of two campaigns that share a model (or accelerator) and not the
    other. Each model (or accelerator) counts once."""
    products: dict[str, list[float]] = {}
    for (one, error), (other, other_error) in itertools.combinations(means.items(), 2):
        if one[same] == other[same] and one[different] != other[different]:
            products.setdefault(one[same], []).append(error * other_error)
    return max(0.0, fmean(map(fmean, products.values()))) if products else 0.0


def _unfitted_error(observed: Sequence[Observation], constants: Efficiencies) -> float:
    """Root mean square error of the campaigns on accelerators of which nothing is fitted. They are
    few, so prefill and decode are taken together."""
    known = {seen.accelerator for seen in usable(observed)}
    campaigns: dict[tuple[str, ...], list[float]] = {}
    for seen in observed:
        if seen.use == "check" and seen.accelerator not in known:
            campaigns.setdefault(seen.group, []).append(seen.log_error(constants))
    means = [fmean(values) for values in campaigns.values()]
    return math.sqrt(fmean(mean**2 for mean in means)) if means else 0.0


def _key(seen: Observation, hidden: Hidden) -> tuple[str, ...]:
    if hidden == "model":
        return (seen.model,)
    if hidden == "accelerator":
        return (seen.accelerator,)
    return (seen.model, seen.accelerator)


def _shares(seen: Observation, key: tuple[str, ...], hidden: Hidden) -> bool:
    if hidden == "model and accelerator":
        return seen.model == key[0] or seen.accelerator == key[1]
    return _key(seen, hidden) == key


def _constants(value: dict[str, float]) -> Efficiencies:
    none = ErrorParts(model=0.0, accelerator=0.0, pair=0.0, length=0.0)
    return Efficiencies(
        prefill_fixed_s=FixedTimes(value["paper"], value["sglang"], value["vllm"]),
        matrix=1 / value["matrix"],
        softmax_flops=1 / value["softmax"],
        memory=1 / value["memory"],
        routed_bytes=value["routed"],
        hidden_bytes=value["hidden"],
        exchange=1 / value["exchange"],
        decode_layer_s=value["layers"],
        decode_expert_layer_s=value["expert_layers"],
        prefill_error=none,
        decode_error=none,
        fitted_accelerators=[],
        unfitted_accelerator_error=0.0,
    )


def _values(constants: Efficiencies) -> list[float]:
    """The coefficients in the order of PRIORS."""
    fixed, parts = constants.prefill_fixed_s, coefficients(constants)._asdict()
    del parts["attention"]
    return [fixed.paper, fixed.sglang, fixed.vllm, *parts.values()]


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
                parts.hidden,
                parts.exchange,
                parts.layers,
                parts.expert_layers,
            ]
        )
    return np.array(rows), np.array(offset)
