"""The one rule for whether two generations are the same, used wherever tokens are compared.

Batching and kernels change the order of floating-point sums, which can change the winner of a near
tie. Two generations are therefore identical if every token is equal. They are also identical if, at
the first difference, the reference's two best logits are closer than twice the largest difference
of logits before it. That largest difference must itself be small, so that a corrupted state cannot
pass for rounding. Without logits (over HTTP) every token must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LARGEST_ROUNDING = 0.02  # of logits, in float32


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    tokens: Sequence[int]
    logits: npt.NDArray[np.float32] | None = None  # [tokens, vocab], before sampling


@dataclass(frozen=True, slots=True)
class TokenComparison:
    identical: bool
    first_difference: int | None  # index of the token
    largest_rounding: float  # of logits, over the tokens before the first difference
    margin: float | None  # between the reference's two best logits at the first difference

    def __str__(self) -> str:
        if self.first_difference is None:
            return f"equal; logits differ by {self.largest_rounding:.2g} at most"
        verdict = "a near tie" if self.identical else "not the same"
        margin = "unknown" if self.margin is None else f"{self.margin:.2g}"
        return (
            f"{verdict}: token {self.first_difference} differs, where the reference's margin is "
            f"{margin}; logits differed by {self.largest_rounding:.2g} at most before"
        )


def compare(reference: GeneratedTokens, other: GeneratedTokens) -> TokenComparison:
    first = _first_difference(reference.tokens, other.tokens)
    if reference.logits is None or other.logits is None:
        return TokenComparison(first is None, first, 0.0, None)
    # After the first difference the two generations continue from different tokens.
    before = len(reference.tokens) if first is None else first
    gap = np.abs(reference.logits[:before] - other.logits[:before])
    rounding = float(gap.max()) if before else 0.0
    small = not np.isnan(rounding) and rounding < LARGEST_ROUNDING
    if first is None:
        return TokenComparison(small, None, rounding, None)
    if first >= min(len(reference.tokens), len(other.tokens)):
        return TokenComparison(False, first, rounding, None)  # one of them ended early
    second, best = np.partition(reference.logits[first], -2)[-2:]
    margin = float(best - second)
    return TokenComparison(small and margin < 2 * rounding, first, rounding, margin)


def assert_token_identical(
    reference: GeneratedTokens, other: GeneratedTokens, what: str = ""
) -> TokenComparison:
    """Raises AssertionError with the position and size of the difference."""
    seen = compare(reference, other)
    assert seen.identical, f"{what}: {seen}" if what else str(seen)
    return seen


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
