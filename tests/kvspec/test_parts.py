from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.kvspec import (
    GQA,
    MLA,
    Geometry,
    Linear,
    LinearState,
    Part,
    WindowedGQA,
    build_spec,
    layer_parts,
)
from prfaas.kvspec.geometry import DTYPE_BYTES

count = st.integers(1, 300)
geometries: st.SearchStrategy[Geometry] = st.one_of(
    st.builds(GQA, st.just((0,)), count, count, count),
    st.builds(WindowedGQA, st.just((0,)), count, count, count, count),
    st.builds(MLA, st.just((0,)), count, count),
    st.builds(Linear, st.just((0,)), count, count, count, count, st.integers(1, 8)),
)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


@given(geometries, dtypes, dtypes)
def test_the_parts_are_all_bytes_of_the_group(geometry: Geometry, kv: str, state: str) -> None:
    (group,) = build_spec([geometry], kv_dtype=kv, state_dtype=state).groups
    parts = layer_parts(geometry, kv_dtype=kv, state_dtype=state)
    one = group.state_bytes if isinstance(group, LinearState) else group.bytes_per_token
    assert sum(part.nbytes for part in parts) == one
    by_heads = [part for part in parts if part.role in ("keys", "values", "state")]
    assert all(part.shape[0] == group.heads for part in by_heads)
    assert by_heads or group.heads == 1


def test_wire_order() -> None:
    types = {"kv_dtype": "bfloat16", "state_dtype": "float32"}
    assert layer_parts(GQA((0,), 4, 192, 128), **types) == (
        Part("keys", (4, 192), "bfloat16"),
        Part("values", (4, 128), "bfloat16"),
    )
    assert layer_parts(MLA((0,), 512, 64), **types) == (
        Part("latent", (512,), "bfloat16"),
        Part("rope", (64,), "bfloat16"),
    )
    # Mamba-2 with 8 groups: the channels of x, B and C.
    assert layer_parts(Linear((0,), 8, 64, 128, 64, 4), **types) == (
        Part("state", (64, 128 * 64), "float32"),
        Part("conv", (64 * 64 + 2 * 8 * 128, 3), "bfloat16"),
    )
    assert layer_parts(Linear((0,), 8, 64, 128, 64, 1), **types) == (
        Part("state", (64, 128 * 64), "float32"),
    )


def test_what_has_no_canonical_form_is_refused() -> None:
    indexed = MLA((0,), kv_lora_rank=512, rope_dim=64, indexer_bytes=132)
    with pytest.raises(InputError, match="132 bytes per token.*native form"):
        layer_parts(indexed, kv_dtype="bfloat16", state_dtype="float32")
    with pytest.raises(InputError, match="'bf16'"):
        layer_parts(GQA((0,), 1, 1, 1), kv_dtype="bf16", state_dtype="float32")
