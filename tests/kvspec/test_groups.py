import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow

SPEC = KVSpec(
    (
        FullAttention("full0", (0, 4), 10),
        SlidingWindow("window0", (1, 2), 7, window=16),
        LinearState("linear0", (3,), 1000),
    )
)


@pytest.mark.parametrize(
    ("tokens", "skip", "expected"),
    [
        (0, 0, 0),
        (1, 0, 2 * 10 + 2 * 7 + 1000),
        (15, 0, 2 * 150 + 2 * 7 * 15 + 1000),
        (16, 0, 2 * 160 + 2 * 7 * 15 + 1000),  # the window keeps 15: the 16th is the next token's
        (100, 0, 2 * 1000 + 2 * 7 * 15 + 1000),
        (100, 64, 2 * 360 + 2 * 7 * 15 + 1000),  # a shared prefix shortens only full attention
        (100, 100, 2 * 7 * 15 + 1000),
    ],
)
def test_kv_bytes(tokens: int, skip: int, expected: int) -> None:
    assert SPEC.kv_bytes(tokens, skip) == expected


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.integers(0, 10**6))
def test_many_lengths_at_once_agree_with_one_by_one(lengths: list[int], skip: int) -> None:
    tokens = np.array(lengths, dtype=float)
    total = SPEC.growing_bytes(tokens, float(skip)) + SPEC.closing_bytes(tokens)
    assert total.tolist() == [SPEC.kv_bytes(length, skip) for length in lengths]


def test_summary_properties() -> None:
    assert SPEC.bytes_per_token == 20
    assert SPEC.state_bytes == 1000
    assert SPEC["window0"].layers == (1, 2)
    with pytest.raises(KeyError):
        SPEC["nothing"]


@pytest.mark.parametrize("heads", [0, -1])
def test_a_group_has_heads(heads: int) -> None:
    assert {group.heads for group in SPEC.groups} == {1}, "unless it names them"
    with pytest.raises(InputError, match="'full0' has .* heads"):
        KVSpec((FullAttention("full0", (0,), 10, heads),))
