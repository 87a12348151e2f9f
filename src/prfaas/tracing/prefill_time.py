"""Divides the time of a prefill by what had to be computed and why. Pure.

    0 ------------- predicted ------------------ seconds
    | lost state | cold cache |    slow prefill     |

The part up to the prediction is divided in proportion to the tokens: those whose blocks were cached
without a state to resume from, and those that were not cached at all.
"""

from __future__ import annotations

from typing import NamedTuple

from prfaas.tracing.summary import CauseKind

# A prefill is slow when it takes this multiple of the prediction, and this many seconds more:
# predictions of short prefills are rough.
SLOW_RATIO = 1.5
SLOW_S = 0.05
COLD_PART = 0.5  # of the prompt had to be computed


class PrefillTime(NamedTuple):
    seconds: float
    predicted_s: float | None  # None: the route made no prediction
    prompt_tokens: int
    cached_tokens: int
    stateless_tokens: int  # cached blocks without a state to resume from

    @property
    def new_tokens(self) -> int:
        return max(1, self.prompt_tokens - self.cached_tokens)


class PrefillPart(NamedTuple):
    kind: CauseKind
    seconds: float


def split_prefill(time: PrefillTime) -> list[PrefillPart]:
    """The parts of the time that are unusual, or that a warm cache would have saved."""
    expected_s = time.seconds
    parts: list[PrefillPart] = []
    predicted_s = time.predicted_s
    if predicted_s is not None and _is_slow(time.seconds, predicted_s):
        expected_s = predicted_s
        parts.append(PrefillPart("slow prefill", time.seconds - predicted_s))
    lost = min(1.0, max(0, time.stateless_tokens) / time.new_tokens)
    parts.append(PrefillPart("lost state", expected_s * lost))
    if time.new_tokens >= COLD_PART * time.prompt_tokens:
        parts.append(PrefillPart("cold cache", expected_s * (1 - lost)))
    return parts


def _is_slow(seconds: float, predicted_s: float) -> bool:
    return seconds > SLOW_RATIO * predicted_s and seconds - predicted_s > SLOW_S
