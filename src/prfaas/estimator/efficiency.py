"""The fitted constants of the estimator. A script fits them to published and measured points."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources

import msgspec

from prfaas.config.strict import decode, parse_toml


class ErrorParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error of estimated times, as standard deviations of ln(estimate / truth). The parts are
    independent of each other."""

    model: float  # common to all accelerators and lengths of a model
    accelerator: float  # common to all models and lengths of an accelerator
    pair: float  # common to all lengths (or batches) of one model on one accelerator
    length: float  # different at short and at long prompts (or small and large batches)

    @property
    def total(self) -> float:
        return math.hypot(self.model, self.accelerator, self.pair, self.length)


class Efficiencies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted constants (docs/estimates.md). Efficiencies are shares of the published peak."""

    prefill_fixed_s: float  # time of a prefill that does not depend on its length
    layer_s: float  # time of one layer of one pass that does not depend on the tokens
    matrix: float  # share of the peak arithmetic that matrix products reach
    attention: float  # share of the peak arithmetic that attention reaches
    memory: float  # share of the memory bandwidth that reading weights and KV reaches
    hidden_bytes: float  # bytes that each hidden element moves through memory, per layer
    exchange: float  # share of the interconnect's bandwidth that exchanges between GPUs reach
    decode_fixed_s: float  # time of a decode step outside the layers
    decode_layer_s: float  # time of one layer of a decode step that does not depend on the tokens
    prefill_error: ErrorParts
    decode_error: ErrorParts
    # Factors on the estimated times. `recalibrated` sets them from measurements of one instance,
    # and a plan with ranges varies them.
    prefill_scale: float = 1.0
    decode_scale: float = 1.0


@cache
def fitted() -> Efficiencies:
    data = resources.files("prfaas.estimator") / "data" / "efficiencies.toml"
    return decode(parse_toml(data.read_text(encoding="utf-8"), data.name), Efficiencies, data.name)
