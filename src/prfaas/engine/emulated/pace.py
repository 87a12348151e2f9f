"""How long emulated work takes and how many bytes it writes. Pure.

Three independent scales shrink the work to what a small machine can do:

    time     seconds of this machine per second of the profile
    bytes    bytes written per byte of the model's state
    output   tokens generated per token of the model: at 1/8 every token stands for eight, so a
             decode step takes eight times as long, and callers request an eighth of the tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prfaas.errors import InputError
from prfaas.kvspec import Group, KVSpec, LinearState
from prfaas.planner.profile import DecodeStep, PrefillProfile


@dataclass(frozen=True, slots=True)
class Scales:
    time: float = 1.0
    bytes: float = 1.0
    output: float = 1.0

    def __post_init__(self) -> None:
        for name in ("time", "bytes", "output"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"{getattr(self, name)} is too small",
                    where=f"{name} scale",
                    fix="use more than 0",
                )


def scaled_spec(spec: KVSpec, byte_scale: float) -> KVSpec:
    """Every layer keeps at least one byte per token (or of its state), so that each segment of the
    model still travels. Scaled bytes cannot be divided among heads any more."""
    if byte_scale == 1.0:
        return spec

    def shrunk(nbytes: int) -> int:
        return max(1, round(nbytes * byte_scale))

    def scaled(group: Group) -> Group:
        if isinstance(group, LinearState):
            return replace(group, state_bytes=shrunk(group.state_bytes), heads=1)
        return replace(group, bytes_per_token=shrunk(group.bytes_per_token), heads=1)

    return KVSpec(tuple(scaled(group) for group in spec.groups))


class Pace:
    def __init__(
        self, profile: PrefillProfile, decode_steps: Sequence[DecodeStep], scales: Scales
    ) -> None:
        self._profile = profile
        steps = sorted(decode_steps)
        self._batches = [step.batch for step in steps]
        self._step_s = [step.step_s for step in steps]
        self._scales = scales

    @property
    def largest_batch(self) -> int:
        return max(self._batches, default=0)

    def prefill_s(self, cached: int, start: int, stop: int) -> float:
        """Seconds for tokens [start, stop) of a prompt computed from token `cached` on. Chunks add
        up: however it is cut, a prompt takes T_prefill(new, cached)."""
        until = self._profile.seconds(np.array([start - cached, stop - cached], float), cached)
        before = float(until[0]) if start > cached else 0.0
        return max(0.0, float(until[1]) - before) * self._scales.time

    def step_s(self, batch: int) -> float:
        """Seconds of one decode step. Linear between measured batches, as in the planner."""
        step_s = float(np.interp(batch, self._batches, self._step_s))
        return step_s * self._scales.time / self._scales.output
