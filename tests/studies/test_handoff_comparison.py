from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prfaas.studies.handoff_comparison import (
    Answer,
    AnswerComparison,
    compare_cut_alike,
    compare_cut_otherwise,
)

TOKENS = [5, 6, 7, 8]


def answer(tokens: list[int], *top: dict[str, float] | None) -> Answer:
    """As vLLM responds: the best candidates of every token."""
    logprobs = {"top_logprobs": list(top)} if top else None
    return Answer.of({"token_ids": tokens, "logprobs": logprobs})


def judged(mine: Answer, expected: Answer, dtype: str = "float32") -> AnswerComparison:
    return compare_cut_otherwise(mine, expected, dtype=dtype, reason="a reason")


def certain(shift: float = 0.0) -> list[dict[str, float]]:
    return [{f"token_id:{token}": -0.1 + shift, "token_id:0": -3.0} for token in TOKENS]


def test_with_the_same_cuts_every_token_is_equal() -> None:
    same = compare_cut_alike(answer(TOKENS), answer(TOKENS), (4, 9, 12))
    assert same.same and same.rule == "same_cuts" and same.cut_tokens == (4, 9, 12)
    assert str(same) == (
        "The decode node's answer equals the prefill node's own answer. "
        "Both computed the prompt with the same 3 cuts."
    )
    other = compare_cut_alike(answer([5, 6, 1, 8]), answer(TOKENS), (4, 9, 12))
    assert not other.same and other.first_difference == 2
    assert "differs from the prefill node's own answer at token 2." in str(other)


def test_without_cuts_a_near_tie_is_the_same_answer() -> None:
    tie = {"token_id:7": -0.700, "token_id:1": -0.702}
    expected = answer(TOKENS, *certain()[:2], tie, *certain()[3:])
    mine = answer([5, 6, 1, 9], *certain(0.003)[:2], tie, *certain()[3:])
    found = judged(mine, expected)
    assert found.same and found.rule == "log_probabilities"
    assert found.first_difference == 2 and found.margin == pytest.approx(0.002)
    assert found.largest_rounding == pytest.approx(0.003)
    assert "at token 2, where the two best candidates are 0.002 apart: this is a near tie" in str(
        found
    )


def test_without_cuts_a_clear_winner_may_not_change() -> None:
    mine = answer([5, 6, 1, 8], *certain(0.003))
    found = judged(mine, answer(TOKENS, *certain()))
    assert not found.same and found.margin == pytest.approx(2.9)
    assert "this is not a near tie" in str(found)


@pytest.mark.parametrize(("dtype", "same"), [("float32", False), ("bfloat16", True), ("fp8", True)])
def test_equal_tokens_with_other_log_probabilities(dtype: str, same: bool) -> None:
    """More than rounding is a changed state, although no token has changed yet. How much rounding
    may be depends on the dtype."""
    found = judged(answer(TOKENS, *certain(0.05)), answer(TOKENS, *certain()), dtype)
    assert found.same is same and found.first_difference is None
    assert ("which is not rounding" in str(found)) is not same
    far = judged(answer(TOKENS, *certain(0.9)), answer(TOKENS, *certain()), dtype)
    assert not far.same


def test_a_shorter_answer_is_another_one() -> None:
    found = judged(answer(TOKENS[:3], *certain()[:3]), answer(TOKENS, *certain()))
    assert not found.same and found.first_difference == 3 and found.margin is None


@pytest.mark.parametrize("top", [(), (None, None, None, None)])
def test_without_anything_every_token_must_be_equal(top: Any) -> None:
    assert judged(answer(TOKENS, *top), answer(TOKENS, *certain())).same
    found = judged(answer([5, 6, 1, 8], *top), answer(TOKENS, *certain()))
    assert not found.same and found.rule == "every_token" and found.first_difference == 2
    assert str(found).endswith(
        "because a reason, and log-probabilities are not available. "
        "Rounding alone can cause such a difference."
    )
    assert msgspec.to_builtins(found)["reason"].startswith("a reason")
