"""A measured profile: T_prefill(new, cached) and decode steps by batch, from samples.

Each point runs once unmeasured (first runs compile and allocate), then all points run in turn,
round after round, so that drift of the machine affects all points alike; the result is the median
of the rounds. Paper: the profile of section 3.4.1, Tables 3 and 5.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prfaas.catalog import DecodePoint, PrefillPoint, ProfileRecord
from prfaas.errors import EngineError, InputError
from prfaas.planner.profile import DecodeStep, PrefillTime

WARM_STEPS = 4
TIMED_STEPS = 24


@dataclass(frozen=True, slots=True)
class PrefillTask:
    new_tokens: int
    cached_tokens: int
    warm_up: bool


@dataclass(frozen=True, slots=True)
class DecodeTask:
    batch: int
    warm_up: bool


Task: TypeAlias = PrefillTask | DecodeTask


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    prefill: tuple[PrefillTime, ...]
    kv_bytes: dict[int, int]  # S_kv by length, nothing cached; empty where it is not known
    decode: tuple[DecodeStep, ...]
    context_tokens: int  # at which decode steps were timed
    rounds: int
    levelled: float  # largest relative change made so that times rise with length; 0: none

    def record(
        self, *, model: str, accelerator: str, engine: str, by: str, gpus: int = 1
    ) -> ProfileRecord:
        """The catalog record. `by` names the tool, date and hardware of the measurement."""
        parts = [by, f"median of {self.rounds}"]
        if self.decode:
            parts.append(f"decode after {self.context_tokens} tokens")
        if self.levelled:
            parts.append(f"times levelled by up to {self.levelled:.1%} to rise with length")
        return ProfileRecord(
            model=model,
            accelerator=accelerator,
            gpus=gpus,
            engine=engine,
            status="measured",
            source="; ".join(parts),
            prefill=[PrefillPoint(p.new_tokens, p.cached_tokens, p.seconds) for p in self.prefill],
            decode=[DecodePoint(step.batch, step.step_s) for step in self.decode],
        )


class TimingSamples:
    """The points to measure, their order, and the times measured."""

    def __init__(
        self, lengths: Sequence[int], cached: Sequence[int], batches: Sequence[int], rounds: int
    ) -> None:
        self.points = [(new, kept) for kept in (0, *sorted(cached)) for new in sorted(lengths)]
        # The middle length: short prompts decode fastest, long ones may not fit.
        self.context_tokens = sorted(lengths)[(len(lengths) - 1) // 2]
        self._batches = sorted(batches)
        self._rounds = rounds
        self._prefill_s: dict[tuple[int, int], list[float]] = {point: [] for point in self.points}
        self._step_s: dict[int, list[float]] = {batch: [] for batch in self._batches}

    @property
    def tasks(self) -> list[Task]:
        made: list[Task] = []
        for number in range(self._rounds + 1):
            made += [PrefillTask(new, kept, warm_up=number == 0) for new, kept in self.points]
            made += [DecodeTask(batch, warm_up=number == 0) for batch in self._batches]
        return made

    def prefilled(self, task: PrefillTask, seconds: float) -> None:
        if not task.warm_up:
            self._prefill_s[task.new_tokens, task.cached_tokens].append(seconds)

    def stepped(self, task: DecodeTask, step_s: float) -> None:
        if not task.warm_up:
            self._step_s[task.batch].append(step_s)

    def measured(self, kv_bytes: dict[int, int]) -> MeasuredProfile:
        prefill: list[PrefillTime] = []
        changed = 0.0
        for kept in sorted({kept for _, kept in self.points}):
            row = [new for new, of in self.points if of == kept]
            medians = [statistics.median(self._prefill_s[new, kept]) for new in row]
            rising = levelled(medians)
            changed = max(changed, *(abs(a / b - 1) for a, b in zip(rising, medians, strict=True)))
            prefill += [PrefillTime(new, kept, s) for new, s in zip(row, rising, strict=True)]
        steps = [DecodeStep(b, statistics.median(self._step_s[b])) for b in self._batches]
        return MeasuredProfile(
            prefill=tuple(prefill),
            kv_bytes=kv_bytes,
            decode=tuple(steps),
            context_tokens=self.context_tokens,
            rounds=self._rounds,
            levelled=changed,
        )


def step_together_s(moments_s: Sequence[Sequence[float]]) -> float:
    """The mean step time while all sequences run, from the times of their tokens: those of the
    sequence that started last, until the first sequence ended."""
    last = max(moments_s, key=lambda moments: moments[0])
    until_s = min(moments[-1] for moments in moments_s)
    times = [at_s for at_s in last if at_s <= until_s][WARM_STEPS:]
    if len(times) < 2:
        raise EngineError(f"{len(moments_s)} sequences never ran together")
    return (times[-1] - times[0]) / (len(times) - 1)


def levelled(times: Sequence[float]) -> list[float]:
    """The nearest non-decreasing times (least squares): where noise makes a longer prompt look
    faster, neighbours get their mean. A profile must rise, and means keep the total."""
    pools: list[list[float]] = []
    for time_s in times:
        pools.append([time_s])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [statistics.fmean(pool) for pool in pools for _ in pool]


def check_points(lengths: Sequence[int], cached: Sequence[int], batches: Sequence[int]) -> None:
    for where, values in (("lengths", lengths), ("cached", cached), ("batches", batches)):
        if len(set(values)) != len(values):
            raise InputError("a value is repeated", where=where, fix="name each value once")
        if min(values, default=1) < 1:
            raise InputError(f"{min(values)} is too small", where=where, fix="use 1 or more")
    if not lengths:
        raise InputError("no length", where="lengths", fix="give one or more")
