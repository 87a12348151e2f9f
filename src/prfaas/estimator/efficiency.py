"""The fitted constants of the estimator. A script fits them to published and measured points."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from prfaas.config.strict import decode, parse_toml

# Engines whose fixed time per prefill is similar (docs/estimates.md).
EngineClass: TypeAlias = Literal["paper", "sglang", "vllm"]


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


class FixedTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a prefill that do not depend on its length, by class of engine."""

    paper: float  # the engines of the paper's Tables 3 and 5; the default
    sglang: float  # SGLang as its makers measure it
    vllm: float  # vLLM and TensorRT-LLM as others measure them


class Efficiencies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted constants (docs/estimates.md). Efficiencies are shares of the published peak."""

    prefill_fixed_s: FixedTimes
    matrix: float  # share of the peak arithmetic that matrix products reach
    softmax_flops: float  # operations of attention whose softmax one GPU computes in a second
    memory: float  # share of the memory bandwidth that reading weights and KV reaches
    routed_bytes: float  # bytes that each element of a routed activation moves through memory
    hidden_bytes: float  # bytes that each hidden element moves through the memory of every GPU
    exchange: float  # share of the interconnect's bandwidth that exchanges between GPUs reach
    decode_layer_s: float  # time of one layer of a decode step that does not depend on the work
    decode_expert_layer_s: float  # the same of a layer's experts
    prefill_error: ErrorParts
    decode_error: ErrorParts
    fitted_accelerators: list[str]  # those with points in the fit
    unfitted_accelerator_error: float  # takes the place of `accelerator` for all others

    def error(self, kind: Literal["prefill", "decode"], accelerator: str) -> ErrorParts:
        """The error of times on this accelerator."""
        parts = self.prefill_error if kind == "prefill" else self.decode_error
        if accelerator in self.fitted_accelerators:
            return parts
        return replace(parts, accelerator=self.unfitted_accelerator_error)


@cache
def fitted() -> Efficiencies:
    data = resources.files("prfaas.estimator") / "data" / "efficiencies.toml"
    return decode(parse_toml(data.read_text(encoding="utf-8"), data.name), Efficiencies, data.name)
