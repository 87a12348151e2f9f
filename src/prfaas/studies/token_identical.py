"""The one rule for whether two generations are the same, used wherever tokens are compared.

Batching and kernels change the order of floating-point sums, which can change the winner of a near
tie. Two generations are therefore identical if every token is equal. They are also identical if, at
the first difference, the reference's two best logits are closer than twice the largest difference
of logits before it. That largest difference must itself be small, so that a corrupted state cannot
pass for rounding. Over HTTP, log-probabilities of the best candidates take the place of logits;
without them every token must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LARGEST_ROUNDING = 0.02  # of logits, in float32
# By the dtype in which a model computes. A logit between 16 and 32 has steps of 1/8 in bfloat16 and
# of 1/64 in float16, and layers before it round, too.
LARGEST_ROUNDINGS = {"float32": LARGEST_ROUNDING, "float16": 0.1, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    tokens: Sequence[int]
    logits: npt.NDArray[np.float32] | None = None  # [tokens, vocab], before sampling
    # Instead of logits: of each token the log-probabilities of the best candidates, by their name.
    candidates: Sequence[Mapping[str, float]] | None = None


@dataclass(frozen=True, slots=True)
class TokenComparison:
    identical: bool
    first_difference: int | None  # index of the token
    # Of logits or log-probabilities, over the tokens before the first difference.
    largest_rounding: float
    margin: float | None  # between the reference's two best ones at the first difference

    def __str__(self) -> str:
        if self.first_difference is None:
            return f"equal; logits differ by {self.largest_rounding:.2g} at most"
        verdict = "a near tie" if self.identical else "not the same"
        margin = "unknown" if self.margin is None else f"{self.margin:.2g}"
        return (
            f"{verdict}: token {self.first_difference} differs, where the reference's margin is "
            f"{margin}; logits differed by {self.largest_rounding:.2g} at most before"
        )


def compare(
    reference: GeneratedTokens,
    other: GeneratedTokens,
    *,
    largest_rounding: float = LARGEST_ROUNDING,
) -> TokenComparison:
    first = _first_difference(reference.tokens, other.tokens)
    # After the first difference the two generations continue from different tokens.
    before = len(reference.tokens) if first is None else first
    rounding = _rounding(reference, other, before)
    if rounding is None:
        return TokenComparison(first is None, first, 0.0, None)
    small = not np.isnan(rounding) and rounding < largest_rounding
    if first is None:
        return TokenComparison(small, None, rounding, None)
    if first >= min(len(reference.tokens), len(other.tokens)):
        return TokenComparison(False, first, rounding, None)  # one of them ended early
    margin = _margin(reference, first)
    near_tie = margin is not None and margin < 2 * rounding
    return TokenComparison(small and near_tie, first, rounding, margin)


def _rounding(reference: GeneratedTokens, other: GeneratedTokens, tokens: int) -> float | None:
    """The largest difference over the first `tokens` tokens; None: it is not known."""
    if reference.logits is not None and other.logits is not None:
        gap = np.abs(reference.logits[:tokens] - other.logits[:tokens])
        return float(gap.max()) if tokens else 0.0
    if reference.candidates is None or other.candidates is None:
        return None
    if min(len(reference.candidates), len(other.candidates)) < tokens:
        return None
    pairs = zip(reference.candidates[:tokens], other.candidates[:tokens], strict=True)
    # Both have the chosen token among their candidates. The others may differ at the end.
    gaps = [abs(one[name] - two[name]) for one, two in pairs for name in one.keys() & two.keys()]
    return float(np.max(gaps)) if gaps else 0.0


def _margin(reference: GeneratedTokens, at: int) -> float | None:
    if reference.logits is not None:
        second, best = np.partition(reference.logits[at], -2)[-2:]
        return float(best - second)
    assert reference.candidates is not None
    if at >= len(reference.candidates) or len(reference.candidates[at]) < 2:
        return None
    second, best = sorted(reference.candidates[at].values())[-2:]
    return best - second


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
