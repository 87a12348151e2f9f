"""Casts between a cache and the wire, and the pairs that are refused."""

from __future__ import annotations

import pytest
import torch

from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical.casts import TORCH_DTYPES, choose_cast

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_wide_casts_are_torch_casts(stored: str, wire: str) -> None:
    cache = torch.randn(64).to(TORCH_DTYPES[stored])
    cast = choose_cast(cache.dtype, wire)
    rows = torch.empty(64, dtype=TORCH_DTYPES[wire])
    cast.to_wire(rows, cache)
    assert torch.equal(rows, cache.to(rows.dtype))
    back = torch.empty_like(cache)
    cast.from_wire(back, rows)
    assert torch.equal(back, rows.to(cache.dtype))
    assert cast.plain == (stored == wire)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_fp8_with_a_scale(fp8: torch.dtype, wire: str) -> None:
    stored = torch.arange(256).to(torch.uint8)
    stored = stored[stored.view(fp8).to(torch.float32).isfinite()]
    cast = choose_cast(torch.uint8, wire, fp8=fp8, scale=0.125)
    rows = torch.empty(stored.shape, dtype=TORCH_DTYPES[wire])
    cast.to_wire(rows, stored)
    assert torch.equal(rows.to(torch.float32), stored.view(fp8).to(torch.float32) * 0.125)
    back = torch.empty_like(stored)
    cast.from_wire(back, rows)
    assert torch.equal(back, stored)  # a power of two loses nothing


def test_fp8_saturates() -> None:
    cast = choose_cast(torch.uint8, "float32", fp8=torch.float8_e4m3fn, scale=2.0)
    stored = torch.empty(2, dtype=torch.uint8)
    cast.from_wire(stored, torch.tensor([1e6, -1e6]))
    assert stored.view(torch.float8_e4m3fn).to(torch.float32).tolist() == [448.0, -448.0]


@pytest.mark.parametrize("fp8", FP8)
def test_fp8_bytes_travel_as_they_are(fp8: torch.dtype) -> None:
    name = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}[fp8]
    stored = torch.arange(256).to(torch.uint8)
    for cast in (choose_cast(torch.uint8, name, fp8=fp8, scale=3.0), choose_cast(fp8, name)):
        assert cast.plain
        rows = torch.empty_like(stored)
        cast.to_wire(rows, stored)
        assert torch.equal(rows, stored)


def test_a_value_beyond_float16_fails() -> None:
    large = torch.tensor([1.0, 1e5])
    with pytest.raises(EngineError, match="float16"):
        choose_cast(torch.float32, "float16").to_wire(torch.empty(2, dtype=torch.float16), large)
    with pytest.raises(EngineError, match="float16"):
        choose_cast(torch.float16, "float32").from_wire(torch.empty(2, dtype=torch.float16), large)


@pytest.mark.parametrize(
    ("cache", "wire", "options", "problem"),
    [
        (torch.float32, "int4", {}, "unknown data type"),
        (torch.uint8, "bfloat16", {}, "no canonical form"),
        (torch.bfloat16, "float8_e4m3fn", {}, "no fp8 scales"),
        (torch.uint8, "float8_e5m2", {"fp8": torch.float8_e4m3fn}, "cannot be sent as"),
        (torch.uint8, "bfloat16", {"fp8": torch.float8_e4m3fn}, "scale"),
        (torch.uint8, "bfloat16", {"fp8": torch.float8_e4m3fn, "scale": 0.0}, "scale"),
        (torch.uint8, "bfloat16", {"fp8": torch.float8_e4m3fn, "scale": float("nan")}, "scale"),
        (torch.bfloat16, "bfloat16", {"fp8": torch.float8_e4m3fn}, "cannot be read as"),
        (torch.uint8, "bfloat16", {"fp8": torch.bfloat16}, "cannot be read as"),
    ],
)
def test_pairs_without_a_cast_are_refused(cache, wire, options, problem) -> None:
    with pytest.raises(InputError, match=problem):
        choose_cast(cache, wire, **options)
