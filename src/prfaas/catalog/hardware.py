"""Accelerators, and the measured times of one model instance on them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from prfaas.catalog.provenance import Sourced, Status
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec

PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One type of GPU. Figures are per GPU, for dense arithmetic."""

    name: str
    title: str = ""
    bf16_tflops: Sourced | None = None
    fp8_tflops: Sourced | None = None
    fp4_tflops: Sourced | None = None
    memory_gb: Sourced | None = None
    memory_tbps: Sourced | None = None
    interconnect_gbs: Sourced | None = None  # GB/s between GPUs of one domain, both directions
    interconnect_gpus: Sourced | None = None  # GPUs of one domain
    tdp_w: Sourced | None = None
    usd_per_hour: Sourced | None = None

    @property
    def display_name(self) -> str:
        return self.title or self.name


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """T_prefill(new, cached), or the KV throughput it was published as."""

    new: PositiveInt
    cached: Annotated[int, msgspec.Meta(ge=0)] = 0
    seconds: PositiveFloat | None = None
    phi_gbps: PositiveFloat | None = None

    def seconds_for(self, published: KVSpec) -> float:
        """The time as given, or as eq. 1 implies it: T = S_kv / Phi_kv, with S_kv in the dtypes
        the throughput was published for."""
        if self.seconds is not None and self.phi_gbps is None:
            return self.seconds
        if self.phi_gbps is None or self.seconds is not None:
            raise InputError(
                f"point new = {self.new} needs one time", fix="give either seconds or phi_gbps"
            )
        if self.cached:
            raise InputError(
                f"point new = {self.new}: phi_gbps is not defined for a cached prefix",
                fix="give seconds",
            )
        return published.kv_bytes(self.new) * 8 / (self.phi_gbps * 1e9)


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decode step of `batch` requests at once takes `step_s`."""

    batch: PositiveInt
    step_s: PositiveFloat


class ProfileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Points of one model on one instance of `gpus` accelerators, as measured or published."""

    model: str
    accelerator: str
    gpus: PositiveInt
    status: Status
    source: str
    prefill: Annotated[list[PrefillPoint], msgspec.Meta(min_length=1)]
    decode: list[DecodePoint] = []
    engine: str = ""

    @property
    def provenance(self) -> str:
        return f"{self.status}: {self.source}"
