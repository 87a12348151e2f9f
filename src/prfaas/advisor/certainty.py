"""How sure a gain is: the errors of estimated times, drawn and propagated.

An option and the cluster that it is compared with keep their hardware; threshold and split are
chosen anew in each draw, as an operator chooses them after measuring. Times that share a model or
an accelerator are wrong together, so a gain is much surer than the rates that it compares. The
draws are a fixed sequence: equal questions have equal answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from prfaas.advisor.market import Array, Build, Market
from prfaas.advisor.option import Alternative, Option, Separate
from prfaas.advisor.work import BuildWork, TrafficWork, prfaas_rate, single_rate
from prfaas.errors import InputError
from prfaas.estimator.uncertainty import EstimateError
from prfaas.planner.profile import DecodeRate, DecodeStep, decode_rate
from prfaas.planner.ranges import DRAWS, HIGH, LOW, Range

What: TypeAlias = Literal["prefill", "decode"]
Factors: TypeAlias = dict[tuple[What, Build], float]


class Worthwhile(NamedTuple):
    """The one instance whose measurement would narrow the range of the gain most."""

    accelerator: str
    gpus: int
    after: Range


@dataclass(frozen=True, slots=True)
class Certainty:
    """The range of a gain from its 5% to its 95% quantile."""

    gain: Range
    wins: float  # share of the draws in which the gain is above 1
    measure: Worthwhile | None


class _Part(NamedTuple):
    what: What
    build: Build
    error: EstimateError


def certainty(
    market: Market, traffic: TrafficWork, option: Option, against: Alternative, gain: float
) -> Certainty | None:
    """How sure the gain of an option over another is. None if no time of the two is estimated."""
    parts = list(_parts(option, *_clusters(against)))
    sources = tuple(dict.fromkeys(name for part in parts for name in _spread(part.error)))
    if not sources:
        return None
    draws = np.random.default_rng(0).standard_normal((DRAWS, len(sources)))
    compared = _Compared(market, traffic, option, against, gain, parts, sources)
    gains = compared.gains(draws)
    if not gains.size:
        return None
    return Certainty(
        gain=_range(gains),
        wins=float((gains > 1).mean()),
        measure=_most_worthwhile(compared, parts, draws, gains),
    )


class _Compared:
    """The gain of one option over another under errors of the times."""

    # limits: the two options, the traffic they share, and the errors that they have
    def __init__(
        self,
        market: Market,
        traffic: TrafficWork,
        option: Option,
        against: Alternative,
        gain: float,
        parts: list[_Part],
        sources: tuple[str, ...],
    ) -> None:
        self._market = market
        self._traffic = traffic
        self._options = ((option,), _clusters(against))
        # The ratio of rates differs from the gain where the two do not cost the same.
        self._scale = gain / (option.lambda_max_rps / against.lambda_max_rps)
        self._parts = parts
        self._sources = sources

    def gains(self, draws: Array, measured: Build | None = None) -> Array:
        """The gain of each draw, without draws in which neither option can serve. The times of the
        `measured` build are not estimated."""
        factors = {
            (part.what, part.build): np.exp(draws @ self.weights(_spread(part.error)))
            for part in self._parts
            if part.build is not measured
        }
        found = []
        for index in range(len(draws)):
            chosen = {key: float(column[index]) for key, column in factors.items()}
            rate, other = (
                sum(self._rate(option, chosen) for option in options) for options in self._options
            )
            if rate or other:
                found.append(self._scale * rate / other if other else math.inf)
        return np.array(found)

    def weights(self, spread: Mapping[str, float]) -> Array:
        return np.array([spread.get(source, 0.0) for source in self._sources])

    def _rate(self, option: Option, factors: Factors) -> float:
        local = self._work(option.local.place.build, factors)
        if local.decode_rps == 0:
            return 0.0
        if option.remote is None or option.link is None:
            return single_rate(local, option.local.instances)
        remote = self._work(option.remote.place.build, factors)
        counts = (option.local.instances, option.remote.instances)
        return prfaas_rate(local, remote, self._traffic.long_bits, *counts, option.link.bps).rps

    def _work(self, build: Build, factors: Factors) -> BuildWork:
        decode = self._decode(build.decode, factors.get(("decode", build), 1.0))
        prefill = factors.get(("prefill", build), 1.0)
        return self._traffic.of(build).slower(prefill, self._traffic.decode_rps(decode))

    def _decode(self, decode: DecodeRate | None, factor: float) -> DecodeRate | None:
        if decode is None or factor == 1.0:
            return decode
        steps = [DecodeStep(step.batch, step.step_s * factor) for step in decode.steps]
        try:
            return decode_rate(steps, self._market.output_tokens_per_s)
        except InputError:
            return None


def _clusters(alternative: Alternative) -> tuple[Option, ...]:
    if isinstance(alternative, Separate):
        return alternative.first, alternative.second
    return (alternative,)


def _parts(*options: Option) -> Iterator[_Part]:
    """The estimated times of the options, each once."""
    seen = set()
    for option in options:
        for group in option.groups:
            build = group.place.build
            if build.prefill_error is not None and ("prefill", build) not in seen:
                seen.add(("prefill", build))
                yield _Part("prefill", build, build.prefill_error)
        build = option.local.place.build
        if build.decode_error is not None and ("decode", build) not in seen:
            seen.add(("decode", build))
            yield _Part("decode", build, build.decode_error)


def _most_worthwhile(
    compared: _Compared, parts: list[_Part], draws: Array, gains: Array
) -> Worthwhile | None:
    """Supposes each measurement in turn, with the outcome that was expected."""
    before = _range(gains)
    found = []
    for build in dict.fromkeys(part.build for part in parts):
        known = [part.error for part in parts if part.build is build]
        seen = np.stack([compared.weights(dict(error.common)) for error in known])
        # What is measured stays as expected; what is independent of it varies as before.
        basis, _ = np.linalg.qr(seen.T)
        after = compared.gains(draws - draws @ basis @ basis.T, measured=build)
        if after.size:
            found.append(Worthwhile(build.accelerator, build.gpus, _range(after)))
    best = min(found, key=lambda one: one.after.high - one.after.low, default=None)
    if best is None or best.after.high - best.after.low >= before.high - before.low:
        return None
    return best


def _spread(error: EstimateError) -> dict[str, float]:
    """Standard deviations by independent source, with what differs from length to length."""
    return {**dict(error.common), error.instance: error.length}


def _range(gains: Array) -> Range:
    # Quantiles are values of the draws: between a gain and infinity there is no middle.
    return Range(
        *(float(q) for q in np.quantile(gains, (LOW, 0.5, HIGH), method="closest_observation"))
    )
