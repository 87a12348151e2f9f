"""The fitted constants of the estimator. A script fits them to published and measured points."""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from prfaas.config.strict import decode, parse_toml


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
    # Errors of the estimates, as standard deviations of ln(estimate / truth).
    model_error: float  # common to all accelerators of a model
    accelerator_error: float  # common to all models of an accelerator
    decode_error: float  # of decode steps


@cache
def fitted() -> Efficiencies:
    data = resources.files("prfaas.estimator") / "data" / "efficiencies.toml"
    return decode(parse_toml(data.read_text(encoding="utf-8"), data.name), Efficiencies, data.name)
