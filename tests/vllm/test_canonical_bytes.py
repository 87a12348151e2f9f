"""In 16 bits the tokens of a small model are no judge: vLLM's own kernels for prefills and decodes
differ. The canonical bytes are: whatever only moves bytes must leave every one of them equal."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from tests.benches import bench

pytestmark = [pytest.mark.grid, pytest.mark.timeout(1800)]  # a server per configuration

LENGTHS = (65, 300)
BF16_INSTRUCTIONS = platform.machine() != "aarch64" or "bf16" in Path("/proc/cpuinfo").read_text()
# Ranks add up in another order. Relative to the largest value of a layer; bfloat16 has steps of
# 2**-8 of a value.
TOLERANCE = 0.1


@pytest.mark.parametrize(
    ("arch", "names"),
    [("falcon-h1", ("tp1", "b64", "ds", "tp2")), ("gemma3", ("tp1", "b64", "tp2"))],
)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            "bfloat16",
            # vLLM's operators for Arm are compiled with them.
            marks=pytest.mark.skipif(not BF16_INSTRUCTIONS, reason="a CPU with BF16 instructions"),
        ),
        "float16",
    ],
)
def test_configurations_send_the_same_bytes(
    tmp_path: Path, arch: str, names: tuple[str, ...], dtype: str
) -> None:
    bytes_bench = bench("canonical_bytes")
    plan = bytes_bench.Plan(dtype, LENGTHS)
    results = list(bytes_bench.compare(arch, names, Path(sys.executable), tmp_path, plan))
    assert [one["configuration"] for one in results] == list(names[1:])
    for one in results:
        assert one["ok"], one
        assert one["kv_dtype"] == dtype
        if one["configuration"] == "tp2":  # nothing is added up before the first layer's caches
            assert min(one["first_layer"].values(), default=1) >= 1, one
        else:
            assert all(one["bit_equal"].values()), one
        assert max(one["difference"].values()) <= TOLERANCE, one
