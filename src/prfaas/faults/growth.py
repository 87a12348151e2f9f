"""Whether processes grow: memory and sockets of each, over its life. Pure.

A process needs some time to reach its size: caches fill, pools of connections are made. So the
first part of a life does not count, and what counts is compared in its first and its last quarter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from prfaas.faults.traces import Held

WARM = 0.3  # share of a life that does not count
SETTLED_S = 60.0  # what counts of a life is worth comparing when it is at least this long
OWN_SHARE, OWN_BYTES = 0.1, 32 << 20  # growth beyond both is growth; bounded stores are smaller
SOCKETS = 24  # pooled connections and requests under way come and go


class Sample(NamedTuple):
    at_s: float
    held: Mapping[str, Held]  # by process


@dataclass(frozen=True, slots=True)
class Growth:
    """Of the longest life of one process."""

    seconds: float  # compared
    own_bytes: tuple[int, int]  # medians of the first and the last quarter
    sockets: tuple[int, int]

    @property
    def flat(self) -> bool:
        if self.seconds < SETTLED_S:
            return True
        first, last = self.own_bytes
        memory = last - first <= max(OWN_BYTES, OWN_SHARE * first)
        return memory and self.sockets[1] - self.sockets[0] <= SOCKETS

    @staticmethod
    def of(samples: Sequence[Sample]) -> dict[str, Growth]:
        """By name of process."""
        lives: dict[tuple[str, int], list[tuple[float, Held]]] = {}
        for sample in samples:
            for name, one in sample.held.items():
                lives.setdefault((name, one.pid), []).append((sample.at_s, one))
        longest: dict[str, Growth] = {}
        for (name, _), life in lives.items():
            growth = _growth(life)
            if name not in longest or growth.seconds > longest[name].seconds:
                longest[name] = growth
        return longest


def _growth(life: Sequence[tuple[float, Held]]) -> Growth:
    counted = life[int(len(life) * WARM) :]
    quarter = max(1, len(counted) // 4)
    first, last = ([one for _, one in part] for part in (counted[:quarter], counted[-quarter:]))
    return Growth(
        round(counted[-1][0] - counted[0][0], 1),
        (_median(one.own_bytes for one in first), _median(one.own_bytes for one in last)),
        (_median(one.sockets for one in first), _median(one.sockets for one in last)),
    )


def _median(values: Iterable[int]) -> int:
    return round(median(values))
