"""Corrects the estimates for one instance with a few measured times of that instance.

The correction is one factor on all prefill times and one on all decode steps: the robust mean of
ln(measured / estimated). What one model and one accelerator have in common is known after it, so
the error that remains is what differs from length to length (docs/estimates.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from prfaas.estimator.efficiency import Efficiencies, ErrorParts
from prfaas.estimator.instance import Instance
from prfaas.estimator.times import decode_s, prefill_s


class MeasuredPrefill(NamedTuple):
    new_tokens: int
    cached_tokens: int
    seconds: float


class MeasuredDecode(NamedTuple):
    batch: int
    context_tokens: int
    step_s: float


def recalibrated(
    constants: Efficiencies,
    instance: Instance,
    prefill: Sequence[MeasuredPrefill] = (),
    decode: Sequence[MeasuredDecode] = (),
) -> Efficiencies:
    """Constants whose estimates of this instance pass through the measured times on average, with
    the error that remains. Without prefill (or decode) times, that part stays as it was."""
    if prefill:
        logs = [
            math.log(p.seconds / prefill_s(instance, constants, p.new_tokens, p.cached_tokens))
            for p in prefill
        ]
        constants = replace(
            constants,
            prefill_scale=constants.prefill_scale * math.exp(statistics.median(logs)),
            prefill_error=remaining(constants.prefill_error, len(logs)),
        )
    if decode:
        logs = [
            math.log(p.step_s / decode_s(instance, constants, p.batch, p.context_tokens))
            for p in decode
        ]
        constants = replace(
            constants,
            decode_scale=constants.decode_scale * math.exp(statistics.median(logs)),
            decode_error=remaining(constants.decode_error, len(logs)),
        )
    return constants


def remaining(error: ErrorParts, measured: int) -> ErrorParts:
    """The error after a correction with `measured` times: the parts common to all lengths are
    known as well as the mean of the measured lengths; the error of each length stays."""
    return ErrorParts(
        model=0.0,
        accelerator=0.0,
        pair=error.length / math.sqrt(measured),
        length=error.length,
    )
