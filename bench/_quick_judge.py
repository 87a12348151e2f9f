"""What `bench/quick.py` concludes from what it has measured.

A figure's ratio is its speed over that of its yardstick, both the best of their samples: what else
runs on the machine only makes a sample slower. A ratio is too low below two thirds of the committed
one; then the figure is measured again, and the second measurement decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

LEAST = 2 / 3  # of the committed ratio

Verdict: TypeAlias = Literal["held", "slower", "not committed", "not measured"]


class Sample(NamedTuple):
    """One measurement of a figure, and of its yardstick just before."""

    figure: str
    value: float
    yardstick: float


class Figure(NamedTuple):
    title: str
    unit: str
    yardstick: str

    @property
    def is_time(self) -> bool:
        return self.unit == "ms"


class Measured(NamedTuple):
    value: float
    yardstick: float
    ratio: float


class Judged(NamedTuple):
    figure: str
    verdict: Verdict
    committed: float | None
    measured: Measured | None


def best(figures: Mapping[str, Figure], samples: Iterable[Sample]) -> dict[str, Measured]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.figure, []).append(sample)
    return {name: _best(figures[name], some) for name, some in found.items()}


def _best(figure: Figure, samples: list[Sample]) -> Measured:
    values = [sample.value for sample in samples]
    yardsticks = [sample.yardstick for sample in samples]
    if figure.is_time:
        value, yardstick = min(values), min(yardsticks)
        return Measured(value, yardstick, yardstick / value)
    value, yardstick = max(values), max(yardsticks)
    return Measured(value, yardstick, value / yardstick)


def judge(measured: Mapping[str, Measured], committed: Mapping[str, float]) -> list[Judged]:
    """One verdict for each figure that was measured or that has a committed ratio."""
    found = []
    for name in [*measured, *(name for name in committed if name not in measured)]:
        seen, least = measured.get(name), committed.get(name)
        verdict: Verdict = "held"
        if seen is None:
            verdict = "not measured"
        elif least is None:
            verdict = "not committed"
        elif seen.ratio < LEAST * least:
            verdict = "slower"
        found.append(Judged(name, verdict, least, seen))
    return found


def fails(judged: Iterable[Judged]) -> list[str]:
    return [one.figure for one in judged if one.verdict in ("slower", "not measured")]
