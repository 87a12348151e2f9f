import pytest

from prfaas.errors import InputError
from prfaas.kvspec import GQA, MLA, Linear, LinearState, WindowedGQA, build_spec


def test_bytes_of_each_kind() -> None:
    spec = build_spec(
        [
            MLA((0,), kv_lora_rank=512, rope_dim=64),
            MLA((1,), kv_lora_rank=512, rope_dim=64, indexer_bytes=132),
            GQA((2,), kv_heads=4, k_dim=192, v_dim=128),
            WindowedGQA((3,), kv_heads=8, k_dim=192, v_dim=128, window=128),
            Linear((4,), k_heads=32, v_heads=32, k_dim=128, v_dim=128, conv_kernel=4),
        ]
    )
    # Sizes as engines print them: 1,152 B per token of an MLA layer, 64 KiB + 2,304 B per KDA head.
    assert spec["full0"].layer_bytes(1) == 1152
    assert spec["full1"].layer_bytes(1) == 1152 + 132
    assert spec["full2"].layer_bytes(1) == 2560
    assert spec["window0"].layer_bytes(1000) == 127 * 5120
    assert spec["linear0"].layer_bytes(1) == 32 * (65536 + 2304)


def test_lightning_has_no_history_and_mamba2_counts_its_groups() -> None:
    lightning = Linear((0,), k_heads=64, v_heads=64, k_dim=128, v_dim=128, conv_kernel=1)
    assert lightning.conv_elements == 0
    # Nemotron-3-Nano: 64 heads of 64, 8 groups, state 128: d_inner + 2 * groups * state channels.
    mamba = Linear((0,), k_heads=8, v_heads=64, k_dim=128, v_dim=64, conv_kernel=4)
    assert mamba.conv_elements == (64 * 64 + 2 * 8 * 128) * 3
    assert mamba.state_elements == 64 * 64 * 128


def test_dtypes() -> None:
    linear = Linear((0,), k_heads=1, v_heads=1, k_dim=2, v_dim=3, conv_kernel=4)
    group = build_spec([linear], kv_dtype="float8_e4m3fn", state_dtype="bfloat16").groups[0]
    assert isinstance(group, LinearState)
    assert group.state_bytes == 6 * 2 + (2 * 2 + 3) * 3 * 1
    with pytest.raises(InputError, match="'bf16'.*bfloat16"):
        build_spec([linear], kv_dtype="bf16")
