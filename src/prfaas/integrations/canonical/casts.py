"""Between the data type of a cache and that of the wire.

    equal data types       the bytes are copied
    wide <-> wide          plain casts: float32, bfloat16, float16
    fp8 <-> wide           value = stored * scale, one scale per layer and part
    fp8 <-> the same fp8   the bytes are copied; both sides have the checkpoint's scales

A value that the receiving data type cannot represent fails the copy: an infinite key or value ruins
every later token. Only fp8 saturates, as engines do when they write their own caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from prfaas.errors import EngineError, InputError

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Cast:
    """`stored` is the cache's data type, `wire` the one that travels. Both are uint8 where fp8
    bytes are copied as they are."""

    stored: torch.dtype
    wire: torch.dtype
    fp8: torch.dtype | None = None  # set when stored bytes are fp8 and the wire is wide
    scale: float = 1.0

    @property
    def plain(self) -> bool:
        """The bytes are the same on both sides."""
        return self.stored == self.wire

    def to_wire(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.fp8 is not None:
            source = source.view(self.fp8).to(torch.float32).mul_(self.scale)
        target.copy_(source)
        self._require_finite(target, self.wire)

    def from_wire(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.fp8 is not None:
            source = _quantised(source, self.fp8, self.scale)
        elif self.stored == torch.float16 and self.wire != torch.float16:
            source = source.to(torch.float16)
            self._require_finite(source, torch.float16)
        target.copy_(source)

    def _require_finite(self, tensor: torch.Tensor, narrow: torch.dtype) -> None:
        if narrow == torch.float16 and not self.plain and bool(tensor.isinf().any()):
            raise EngineError(
                "a value of the cache exceeds the range of float16: set the wire's data type to "
                "bfloat16 or float32, and run both engines in one of them"
            )


def choose_cast(
    cache: torch.dtype,
    wire: str,
    *,
    fp8: torch.dtype | None = None,
    scale: float | None = None,
    where: str = "wire_kv_dtype",
) -> Cast:
    """InputError for a pair that no cast joins; `where` names the setting of the wire's data type.
    `fp8` says how an fp8 cache's bytes are read."""
    target = TORCH_DTYPES.get(wire)
    if target is None:
        raise InputError(
            f"unknown data type {wire!r}",
            where=where,
            fix=f"use one of: {', '.join(TORCH_DTYPES)}",
        )
    if fp8 is None and cache in (torch.float8_e4m3fn, torch.float8_e5m2):
        fp8 = cache
    if fp8 is None:
        if cache not in _WIDE:
            raise InputError(
                f"a cache of {cache} has no canonical form",
                where="kv_cache_dtype",
                fix="use float32, bfloat16, float16 or fp8, or the native form",
            )
        if target not in _WIDE:
            raise InputError(
                f"a cache of {cache} cannot be sent as {wire}: the cache has no fp8 scales",
                where=where,
                fix="use float32, bfloat16 or float16",
            )
        return Cast(cache, target)
    if fp8 not in (torch.float8_e4m3fn, torch.float8_e5m2) or cache.itemsize != 1:
        raise InputError(
            f"a cache of {cache} cannot be read as {fp8}",
            where="fp8",
            fix="use float8_e4m3fn or float8_e5m2 for a cache of one byte per element",
        )
    if target == fp8:
        return Cast(torch.uint8, torch.uint8)
    if target not in _WIDE:
        raise InputError(
            f"an fp8 cache of {fp8} cannot be sent as {wire}",
            where=where,
            fix="use the cache's own data type, or a wide one",
        )
    if scale is None or not math.isfinite(scale) or scale <= 0:
        raise InputError(
            f"the scale of an fp8 cache is {scale}",
            where="scales",
            fix="give one positive scale for each part of the layer",
        )
    return Cast(torch.uint8, target, fp8, scale)


def _quantised(rows: torch.Tensor, fp8: torch.dtype, scale: float) -> torch.Tensor:
    most = torch.finfo(fp8).max
    return (rows.to(torch.float32) / scale).clamp_(-most, most).to(fp8).view(torch.uint8)
