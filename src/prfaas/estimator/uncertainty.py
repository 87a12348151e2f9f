"""How far estimates may be off, and what measurements say about that.

The logarithm of truth / estimate is a sum of effects: of the model, of the accelerator, of the pair
of both, and of the prompt length or the batch (`ErrorParts`). Before anything is measured the
effects are independent and normal, with the standard deviations of the fit (docs/estimates.md). A
measured time is the sum of its effects, so measurements turn the effects into a joint normal
distribution: its mean corrects the estimates, also those of other models on the same accelerator;
its covariance is the error that remains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from prfaas.estimator.efficiency import Efficiencies

Array: TypeAlias = npt.NDArray[np.float64]
Phase: TypeAlias = Literal["prefill", "decode"]
_NOTHING = 1e-9


class Effect(NamedTuple):
    """One cause of an error, such as the accelerator h20 for prefill."""

    phase: Phase
    part: Literal["model", "accelerator", "pair"]
    name: str

    @property
    def source(self) -> str:
        return f"{self.phase} {self.part} {self.name}"


@dataclass(frozen=True, slots=True)
class EstimateError:
    """The error of ln(truth / estimate) of one instance, as standard deviations by independent
    source. Two instances that share a source are wrong together."""

    instance: str
    common: tuple[tuple[str, float], ...]  # common to all lengths of a prompt, or all batches
    length: float  # differs from length to length; no other instance shares it

    @property
    def sigma(self) -> float:
        return math.hypot(self.length, *(part for _, part in self.common))

    @property
    def in_words(self) -> str:
        return f"two of three are within a factor of {math.exp(self.sigma):.2f}"


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time: the sum of some effects, and noise."""

    effects: tuple[Effect, ...]
    log_ratio: float  # ln(measured / estimated)
    noise: float  # standard deviation


def effects_of(phase: Phase, model: str, accelerator: str) -> tuple[Effect, ...]:
    return (
        Effect(phase, "model", model),
        Effect(phase, "accelerator", accelerator),
        Effect(phase, "pair", f"{model} on {accelerator}"),
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The effects after some measurements. Effects that no measurement has keep their prior."""

    constants: Efficiencies
    means: Mapping[Effect, float] = field(default_factory=dict)
    parts: Mapping[Effect, tuple[tuple[str, float], ...]] = field(default_factory=dict)

    def correction(self, phase: Phase, model: str, accelerator: str) -> float:
        """The factor by which these estimates are multiplied."""
        effects = effects_of(phase, model, accelerator)
        return math.exp(sum(self.means.get(effect, 0.0) for effect in effects))

    def error(self, phase: Phase, model: str, accelerator: str, gpus: int) -> EstimateError:
        common: dict[str, float] = {}
        for effect in effects_of(phase, model, accelerator):
            alone = ((effect.source, _prior(self.constants, effect)),)
            for source, part in self.parts.get(effect, alone):
                common[source] = common.get(source, 0.0) + part
        return EstimateError(
            instance=f"{phase} of {model} on {gpus} x {accelerator}",
            common=tuple((source, part) for source, part in common.items() if part),
            length=self.constants.error(phase, accelerator).length,
        )


def calibrate(constants: Efficiencies, observations: Sequence[Observation]) -> Calibration:
    """Conditions the effects on the observations."""
    if not observations:
        return Calibration(constants)
    effects = sorted({effect for seen in observations for effect in seen.effects})
    before = np.diag([_prior(constants, effect) ** 2 for effect in effects])
    seen_in = np.array([[float(e in seen.effects) for e in effects] for seen in observations])
    # Two equal observations without noise would make the matrix singular.
    noise = np.diag([max(seen.noise, _NOTHING) ** 2 for seen in observations])
    gain = np.linalg.solve(seen_in @ before @ seen_in.T + noise, seen_in @ before).T
    mean = gain @ np.array([seen.log_ratio for seen in observations])
    root = _square_root(before - gain @ seen_in @ before)
    return Calibration(
        constants,
        means=dict(zip(effects, mean.tolist(), strict=True)),
        parts={
            effect: tuple((f"measured {i}", float(part)) for i, part in enumerate(row))
            for effect, row in zip(effects, root, strict=True)
        },
    )


class LogRatio(NamedTuple):
    """ln(measured / estimated) of one time."""

    value: float
    doubt: float = 0.0  # standard deviation of what the estimate does not know of the engine


def observation(
    constants: Efficiencies, phase: Phase, model: str, accelerator: str, ratios: Sequence[LogRatio]
) -> Observation:
    """Measured times of one instance. They count as one observation of what they have in common;
    what differs from length to length, and the doubt about the engine, is its noise."""
    length = max(constants.error(phase, accelerator).length, _NOTHING)
    weights = [1 / (length**2 + ratio.doubt**2) for ratio in ratios]
    weighted = sum(w * ratio.value for w, ratio in zip(weights, ratios, strict=True))
    return Observation(
        effects=effects_of(phase, model, accelerator),
        log_ratio=weighted / sum(weights),
        noise=math.sqrt(1 / sum(weights)),
    )


def _prior(constants: Efficiencies, effect: Effect) -> float:
    # Only the accelerator's part depends on the accelerator.
    parts = constants.error(effect.phase, effect.name)
    return {"model": parts.model, "accelerator": parts.accelerator, "pair": parts.pair}[effect.part]


def _square_root(covariance: Array) -> Array:
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
