"""Whether a hand-off has changed an answer: the rule, the verdict and the words for it. Pure.

The reference is the answer of one node that computes the whole prompt. Sums depend on where a
prompt is cut, above all in bfloat16, so that equal answers need equal cuts:

    rule               used when                                    the answers
    same_cuts          both nodes report where they cut the prompt  are equal
    log_probabilities  both nodes report log-probabilities          are equal, or part at a near tie
    every_token        neither                                      are equal
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from prfaas.studies.token_identical import LARGEST_ROUNDINGS, GeneratedTokens, compare

ComparisonRule: TypeAlias = Literal["same_cuts", "log_probabilities", "every_token"]
CANDIDATES = 5  # log-probabilities per token; OpenAI's API allows as many
LOGPROB_FIELDS: Mapping[str, Any] = {"logprobs": CANDIDATES, "return_tokens_as_token_ids": True}


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    rule: ComparisonRule
    same: bool  # by the rule: the hand-off has not changed the answer
    first_difference: int | None  # index of the token; None: every token is equal
    # Of log-probabilities, over the tokens before the first difference; None: they are not known.
    largest_rounding: float | None = None
    # Between the log-probabilities of the reference's two best candidates at the first difference.
    margin: float | None = None
    cut_tokens: tuple[int, ...] | None = None  # of both computations; None: not known to be equal
    reason: str = ""  # why the cuts of the two are not known to be equal

    def __str__(self) -> str:
        """One or two sentences."""
        own = "the prefill node's own answer"
        if self.first_difference is None:
            said = f"The decode node's answer equals {own}"
        else:
            said = f"The decode node's answer differs from {own} at token {self.first_difference}"
        match self.rule:
            case "same_cuts":
                cuts = len(self.cut_tokens or ())
                return f"{said}. Both computed the prompt with the same {cuts} cuts."
            case "log_probabilities":
                return f"{said}{self._rounding()}."
            case "every_token":
                rule = f"Only equal tokens count as the same, because {self.reason}."
                if not self.same:
                    rule += " Rounding alone can cause such a difference."
                return f"{said}. {rule}"

    def _rounding(self) -> str:
        rounding = f"log-probabilities differ by {self.largest_rounding or 0.0:.2g} at most"
        if self.first_difference is None:
            return f"; {rounding}" if self.same else f", but {rounding}, which is not rounding"
        if self.margin is None:
            return f"; before that, {rounding}"
        verdict = "a near tie" if self.same else "not a near tie"
        return (
            f", where the two best candidates are {self.margin:.2g} apart: this is {verdict}, "
            f"because before that {rounding}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One node's answer, as far as it is compared."""

    tokens: Sequence[int]
    candidates: Sequence[Mapping[str, float]] | None  # None: the node reports none

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> Answer:
        """From a completion's choice."""
        top: Any = (choice.get("logprobs") or {}).get("top_logprobs") or ()
        known = bool(top) and all(isinstance(one, Mapping) for one in top)
        return cls(choice["token_ids"], top if known else None)


def compare_cut_alike(answer: Answer, expected: Answer, cuts: Sequence[int]) -> AnswerComparison:
    found = compare(GeneratedTokens(expected.tokens), GeneratedTokens(answer.tokens))
    first = found.first_difference
    return AnswerComparison("same_cuts", first is None, first, cut_tokens=tuple(cuts))


def compare_cut_otherwise(
    answer: Answer, expected: Answer, *, dtype: str, reason: str
) -> AnswerComparison:
    """`reason`: why the cuts of the two are not known to be equal."""
    reference, other = (
        GeneratedTokens(one.tokens, candidates=one.candidates) for one in (expected, answer)
    )
    known = expected.candidates is not None and answer.candidates is not None
    # A cache in 8 bits belongs to a model that computes in 16.
    rounding = LARGEST_ROUNDINGS.get(dtype, LARGEST_ROUNDINGS["bfloat16"])
    found = compare(reference, other, largest_rounding=rounding)
    if not known:
        reason += ", and log-probabilities are not available"
        first = found.first_difference
        return AnswerComparison("every_token", found.identical, first, reason=reason)
    return AnswerComparison(
        "log_probabilities",
        found.identical,
        found.first_difference,
        found.largest_rounding,
        found.margin,
        reason=reason,
    )
