"""One instance whose times are estimated: a model on some GPUs of one accelerator.

GPUs of one interconnect domain share every layer (tensor parallelism). Domains form a pipeline:
each has some of the layers, as vLLM's and SGLang's guides advise across nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from prfaas.catalog.hardware import Accelerator
from prfaas.catalog.provenance import Sourced
from prfaas.catalog.shape import ModelShape, WeightFormat
from prfaas.errors import InputError
from prfaas.estimator.efficiency import EngineClass
from prfaas.kvspec import KVSpec

# Tokens of one pass of a prefill. SGLang's and vLLM's defaults on data-center GPUs.
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Instance:
    shape: ModelShape
    spec: KVSpec
    accelerator: Accelerator
    gpus: int
    chunk_tokens: int = CHUNK_TOKENS
    engine_class: EngineClass = "paper"  # which fixed time a prefill has

    @property
    def title(self) -> str:
        return f"{self.shape.name} on {self.gpus} x {self.accelerator.display_name}"

    def peak_flops(self, weights: WeightFormat) -> float:
        """Peak arithmetic of one GPU for products with weights of this format.

        Weights in 4 bits are multiplied in 4 bits where the GPU can and the format is fp4;
        otherwise, like fp8 on a GPU without fp8, they are converted and multiplied in bf16."""
        gpu = self.accelerator
        if weights == "fp4" and gpu.fp4_tflops is not None:
            return gpu.fp4_tflops.value * 1e12
        if weights == "fp8" and gpu.fp8_tflops is not None:
            return gpu.fp8_tflops.value * 1e12
        return self._bf16_tflops() * 1e12

    @property
    def memory_bytes(self) -> float:
        """Memory of all GPUs together."""
        return self._required("memory_gb").value * 1e9 * self.gpus

    @property
    def memory_bytes_per_s(self) -> float:
        """Memory bandwidth of one GPU."""
        return self._required("memory_tbps").value * 1e12

    @property
    def interconnect_bytes_per_s(self) -> float:
        """What one GPU can send to others of the instance, in one direction."""
        return self._required("interconnect_gbs").value * 1e9 / 2

    @property
    def domain_gpus(self) -> float:
        """GPUs of each pipeline stage when every interconnect domain is one stage."""
        if self.gpus == 1:
            return 1.0
        domains = math.ceil(self.gpus / self._required("interconnect_gpus").value)
        return self.gpus / domains

    def _bf16_tflops(self) -> float:
        gpu = self.accelerator
        if gpu.bf16_tflops is not None:
            return gpu.bf16_tflops.value
        # Every accelerator of the catalog doubles its rate when it halves its numbers.
        if gpu.fp8_tflops is not None:
            return gpu.fp8_tflops.value / 2
        if gpu.fp4_tflops is not None:
            return gpu.fp4_tflops.value / 4
        raise self._unknown("bf16_tflops")

    def _required(self, field: str) -> Sourced:
        value: Sourced | None = getattr(self.accelerator, field)
        if value is None:
            raise self._unknown(field)
        return value

    def _unknown(self, field: str) -> InputError:
        return InputError(
            f"the catalog does not have {field} of {self.accelerator.name}, so its times cannot "
            "be estimated",
            where=f"accelerators.{self.accelerator.name}.{field}",
            fix="add it in a catalog file as [[accelerators]], or measure a profile",
        )


def with_weights(shape: ModelShape, weights: WeightFormat) -> ModelShape:
    """The model with all its matrices in another format, as a quantised checkpoint has them. In
    4 bits only the experts are quantised where there are experts."""
    if weights in ("int4", "fp4") and shape.experts is not None:
        return replace(shape, expert_weights=weights)
    return replace(shape, weights=weights, expert_weights=weights)
