"""vLLM's own operation judges the packings: what it writes for a token, the converter reads, and
what the converter writes is bit-equal to what the operation writes."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from prfaas.integrations.canonical import (
    AttentionConverter,
    AttentionForm,
    Packing,
    find_cpu_packing,
)
from prfaas.kvspec.parts import Part

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
FLAGS = Path("/proc/cpuinfo").read_text(encoding="utf-8").replace(":", " ").split()
IS_ARM = platform.machine() == "aarch64"
# Instruction set, data type, tokens in a block, dims of a head, packing.
CASES: list[tuple[str, torch.dtype, int, int, Packing]] = [
    ("vec", torch.float32, 128, 64, "cpu_vec"),
    ("vec", torch.float32, 32, 32, "cpu_vec"),
    ("vec", torch.bfloat16, 64, 64, "cpu_vec"),
    ("vec16", torch.float32, 16, 64, "cpu_vec"),
    ("vec16", torch.float32, 32, 80, "cpu_vec"),
    ("vec16", torch.bfloat16, 48, 64, "cpu_vec"),
    ("amx", torch.bfloat16, 32, 64, "cpu_amx"),
    ("amx", torch.bfloat16, 128, 128, "cpu_amx"),
    ("neon", torch.float32, 32, 64, "cpu_vec"),
    ("neon", torch.float32, 128, 128, "cpu_vec"),
    ("neon", torch.float16, 64, 96, "cpu_vec"),
    # The build decides, not the machine: vLLM's wheel for Arm packs so even where the machine has
    # no BF16 instructions to use it with.
    ("neon", torch.bfloat16, 32, 64, "cpu_bfmmla"),
    ("neon", torch.bfloat16, 128, 96, "cpu_bfmmla"),
]
NEEDS = {"amx": "amx_tile"}
HEADS, BLOCKS, TABLE, START = 3, 6, [4, 1, 2], 5


def require(isa: str) -> None:
    """An operation for another machine's instructions ends the process, so it is not tried."""
    if (isa == "neon") != IS_ARM and isa in ("neon", "amx"):
        pytest.skip(f"{isa} belongs to another kind of machine")
    if isa in NEEDS and NEEDS[isa] not in FLAGS:
        pytest.skip(f"this machine has no {NEEDS[isa]}")


def written_by_vllm(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, isa: str, **options: object
) -> None:
    """Tokens from START on, in the blocks of TABLE."""
    blocks, heads, n, content = cache.shape
    places = torch.arange(START, START + len(key))
    slots = torch.tensor(TABLE)[places // n] * n + places % n
    keys, values = cache.view(blocks, heads, 2 * n, content // 2).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa, **options)


def form_of(packing: Packing, dim: int, dtype: str) -> AttentionForm:
    parts = Part("keys", (HEADS, dim), dtype), Part("values", (HEADS, dim), dtype)
    return AttentionForm(packing, parts, range(HEADS))


@pytest.mark.parametrize(("isa", "dtype", "n", "dim", "packing"), CASES)
def test_vllm_and_the_converter_write_the_same_blocks(
    isa: str, dtype: torch.dtype, n: int, dim: int, packing: Packing
) -> None:
    require(isa)
    tokens = 2 * n + 5
    key, value = (torch.randn(tokens, HEADS, dim).to(dtype) for _ in range(2))
    cache = torch.zeros(BLOCKS, HEADS, n, 2 * dim, dtype=dtype)
    written_by_vllm(key, value, cache, isa)
    form = form_of(packing, dim, NAMES[dtype])
    page = bytearray(tokens * 2 * HEADS * dim * dtype.itemsize)
    AttentionConverter(cache, BLOCKS, form).save(TABLE, START, START + tokens, [memoryview(page)])
    rows = torch.frombuffer(page, dtype=dtype).view(tokens, 2, HEADS, dim)
    assert torch.equal(rows[:, 0], key)
    assert torch.equal(rows[:, 1], value)
    loaded = torch.full_like(cache, float("nan"))
    loaded[[0, 3, 5]] = 0
    AttentionConverter(loaded, BLOCKS, form).load(TABLE, START, START + tokens, [memoryview(page)])
    assert torch.equal(loaded, cache)


@pytest.mark.parametrize(("isa", "dtype", "n", "dim", "packing"), CASES)
def test_the_packing_is_recognised(
    isa: str, dtype: torch.dtype, n: int, dim: int, packing: Packing
) -> None:
    require(isa)

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        keys, values = cache.view(2, -1, 2 * n, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(n, 2 * n), isa)

    assert find_cpu_packing(write, dtype, block_tokens=n, dim=dim) == packing


@pytest.mark.parametrize(("isa", "packing"), [("vec", "cpu_vec"), ("amx", "cpu_amx")])
@pytest.mark.parametrize(
    ("kind", "fp8"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_an_fp8_cache_is_read_with_its_scales(
    isa: str, packing: Packing, kind: str, fp8: torch.dtype
) -> None:
    require(isa)
    if IS_ARM:
        pytest.skip("vLLM has fp8 caches on x86 alone")
    key, value = (torch.randn(50, HEADS, 64).bfloat16() for _ in range(2))
    cache = torch.zeros(BLOCKS, HEADS, 32, 128, dtype=torch.uint8)
    written_by_vllm(key, value, cache, isa, k_scale=0.01, v_scale=0.02, kv_cache_dtype=kind)
    form = AttentionForm(
        packing, form_of(packing, 64, "float32").parts, range(HEADS), False, (0.01, 0.02), fp8
    )
    page = bytearray(50 * 2 * HEADS * 64 * 4)
    AttentionConverter(cache, BLOCKS, form).save([4, 1], START, START + 50, [memoryview(page)])
    rows = torch.frombuffer(page, dtype=torch.float32).view(50, 2, HEADS, 64)
    step = 2.0 ** (-3 if fp8 == torch.float8_e4m3fn else -2)  # vLLM's CPU operation truncates
    for near, exact, scale in ((rows[:, 0], key, 0.01), (rows[:, 1], value, 0.02)):
        assert ((near - exact).abs() <= exact.abs() * step + scale * 0.02).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_cases_have_what_this_machine_uses(dtype: torch.dtype, dim: int) -> None:
    isa = _get_attn_isa(dtype, 128, dim)
    assert any(case[0] == isa and case[1] == dtype for case in CASES), isa
