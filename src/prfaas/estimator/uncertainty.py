"""How far estimates may be off, and what measurements say about that.

The logarithm of truth / estimate is a sum of effects: one of the model, on every accelerator; one
of the accelerator, for every model; and what differs between prompt lengths. Decode steps have
effects of their own. Before anything is measured the effects are independent and normal, with the
standard deviations of the fit (docs/estimates.md). A measured time is the sum of its effects, so
measurements turn the effects into a joint normal distribution: its mean corrects the estimates,
its covariance is the error that remains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from prfaas.estimator.efficiency import Efficiencies

Array: TypeAlias = npt.NDArray[np.float64]
Kind: TypeAlias = Literal[
    "model", "accelerator", "lengths", "decode of model", "decode of accelerator", "batches"
]
_NOTHING = 1e-9
LENGTH_ERROR = 0.1


class Effect(NamedTuple):
    """One cause of an error: what it is of, such as the accelerator h20."""

    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class EstimateError:
    """The error of ln(time), as standard deviations by independent source. Two estimates that
    share a source are wrong together."""

    parts: tuple[tuple[str, float], ...]

    @property
    def sigma(self) -> float:
        """Standard deviation of ln(truth / estimate)."""
        return math.sqrt(sum(part * part for _, part in self.parts))

    @property
    def in_words(self) -> str:
        return f"two of three are within {math.expm1(self.sigma):.0%}"


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time: the sum of some effects, and noise."""

    effects: tuple[Effect, ...]
    log_ratio: float  # ln(measured / estimated)
    noise: float  # standard deviation


def prefill_effects(model: str, accelerator: str) -> tuple[Effect, ...]:
    return Effect("model", model), Effect("accelerator", accelerator)


def decode_effects(model: str, accelerator: str) -> tuple[Effect, ...]:
    return Effect("decode of model", model), Effect("decode of accelerator", accelerator)


def prior_errors(constants: Efficiencies) -> dict[Kind, float]:
    """Standard deviations before anything is measured."""
    # The points do not tell the two parts of the decode error apart: each has half its variance.
    half = constants.decode_error / math.sqrt(2)
    return {
        "model": constants.model_error,
        "accelerator": constants.accelerator_error,
        "lengths": LENGTH_ERROR,
        "decode of model": half,
        "decode of accelerator": half,
        "batches": LENGTH_ERROR,
    }


@dataclass(frozen=True, slots=True)
class Calibration:
    """The effects after some measurements. Effects that no measurement touches keep their prior."""

    prior: Mapping[Kind, float]
    means: Mapping[Effect, float] = field(default_factory=dict)
    parts: Mapping[Effect, tuple[tuple[str, float], ...]] = field(default_factory=dict)

    def correction(self, effects: Iterable[Effect]) -> float:
        """The factor by which estimates with these effects are multiplied."""
        return math.exp(sum(self.means.get(effect, 0.0) for effect in effects))

    def error(self, effects: Iterable[Effect]) -> EstimateError:
        total: dict[str, float] = {}
        for effect in effects:
            alone = ((f"{effect.kind} {effect.name}", self.prior[effect.kind]),)
            for source, part in self.parts.get(effect, alone):
                total[source] = total.get(source, 0.0) + part
        return EstimateError(tuple((name, part) for name, part in total.items() if part))


def calibrate(prior: Mapping[Kind, float], observations: Sequence[Observation]) -> Calibration:
    """Conditions the effects on the observations."""
    if not observations:
        return Calibration(prior)
    effects = sorted({effect for seen in observations for effect in seen.effects})
    before = np.diag([prior[effect.kind] ** 2 for effect in effects])
    seen_in = np.array([[float(e in seen.effects) for e in effects] for seen in observations])
    # Two equal observations without noise would make the matrix singular.
    noise = np.diag([max(seen.noise, _NOTHING) ** 2 for seen in observations])
    gain = np.linalg.solve(seen_in @ before @ seen_in.T + noise, seen_in @ before).T
    mean = gain @ np.array([seen.log_ratio for seen in observations])
    root = _square_root(before - gain @ seen_in @ before)
    return Calibration(
        prior,
        means=dict(zip(effects, mean.tolist(), strict=True)),
        parts={
            effect: tuple((f"measured {i}", float(part)) for i, part in enumerate(row))
            for effect, row in zip(effects, root, strict=True)
        },
    )


def _square_root(covariance: Array) -> Array:
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
