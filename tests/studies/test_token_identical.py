"""The rule by which generations are compared: what passes for rounding, and what never does."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas.studies.token_identical import GeneratedTokens, assert_token_identical, compare

LOGITS = np.array([[3.0, 1.0, 0.0], [2.0, 1.999, 0.0], [0.0, 0.0, 5.0]], dtype=np.float32)
REFERENCE = GeneratedTokens((0, 0, 2), LOGITS)


def other(tokens: tuple[int, ...], shift: float) -> GeneratedTokens:
    return GeneratedTokens(tokens, LOGITS + np.float32(shift))


def test_equal_tokens_with_rounding_are_identical() -> None:
    seen = compare(REFERENCE, other((0, 0, 2), 0.001))
    assert seen.identical and seen.first_difference is None
    assert seen.largest_rounding == pytest.approx(0.001, rel=1e-3)


def test_a_near_tie_may_fall_the_other_way() -> None:
    seen = compare(REFERENCE, other((0, 1, 1), 0.001))
    assert seen.identical and seen.first_difference == 1
    assert seen.margin == pytest.approx(0.001, rel=1e-2)


def test_a_clear_choice_may_not() -> None:
    assert not compare(REFERENCE, other((0, 2, 2), 0.0001)).identical
    assert not compare(REFERENCE, other((1, 0, 2), 0.001)).identical  # nothing seen before it


def test_large_differences_are_never_rounding() -> None:
    assert not compare(REFERENCE, other((0, 0, 2), 0.05)).identical
    assert not compare(REFERENCE, other((0, 1, 2), 0.05)).identical
    assert not compare(REFERENCE, GeneratedTokens((0, 0, 2), LOGITS * np.float32(np.nan))).identical


def test_an_early_end_is_a_difference() -> None:
    assert not compare(REFERENCE, GeneratedTokens((0, 0), LOGITS[:2])).identical


def test_without_logits_every_token_counts() -> None:
    assert compare(GeneratedTokens((1, 2)), GeneratedTokens((1, 2))).identical
    with pytest.raises(AssertionError, match="case 7: not the same: token 1 differs"):
        assert_token_identical(GeneratedTokens((1, 2)), GeneratedTokens((1, 3)), "case 7")
