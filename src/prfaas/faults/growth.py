"""Whether processes grow: the memory of each, over its life. Pure.

A process needs some time to reach its size: caches and stores fill. So the first third of a life
does not count, and never less than `WARM_S`; of the rest, the second half may not be larger than
the first, unless an older process of its kind stays at a size that this one has not reached.

    0 ── does not count ── max(WARM_S, 1/3) ── median ── middle ── median ── its end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from prfaas.faults.resource_usage import Held

WARM, WARM_S = 1 / 3, 120.0  # bounded stores are full by then, at the rate of a soak
SETTLED_S = 45.0  # what counts of a life is worth comparing when it is at least this long
OWN_SHARE, OWN_BYTES = 0.03, 4 << 20  # beyond both it has grown; medians of a flat one differ by 2


class Sample(NamedTuple):
    at_s: float
    held: Mapping[str, Held]  # by process


@dataclass(frozen=True, slots=True)
class Growth:
    """Of the longest life of one process."""

    seconds: float  # compared
    own_bytes: tuple[int, int]  # medians of the first and the second half

    @property
    def judged(self) -> bool:
        """Whether it has lived long enough to tell."""
        return self.seconds >= SETTLED_S

    @property
    def flat(self) -> bool:
        if not self.judged:
            return True
        first, last = self.own_bytes
        return last - first <= max(OWN_BYTES, OWN_SHARE * first)

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


def grown(growth: Mapping[str, Growth]) -> list[str]:
    """Who has grown, and will, for all that can be seen."""

    def may_reach(name: str, one: Growth) -> int:
        elders = [
            other.own_bytes[1]
            for its, other in growth.items()
            if _kind(its) == _kind(name) and other.seconds > one.seconds and other.flat
        ]
        return max(elders, default=0)

    return [
        name
        for name, one in growth.items()
        if not one.flat and one.own_bytes[1] > may_reach(name, one)
    ]


def _kind(name: str) -> str:
    """Kvds, gateways and relays say what they are; an engine's name is its node's."""
    first = name.partition("-")[0]
    return first if first in ("kvd", "gateway", "wan") else "node"


def _growth(life: Sequence[tuple[float, Held]]) -> Growth:
    born_s, died_s = life[0][0], life[-1][0]
    from_s = born_s + max(WARM_S, WARM * (died_s - born_s))
    counted = [one for one in life if one[0] >= from_s] or life[-1:]
    half = max(1, len(counted) // 2)
    first, last = ([one for _, one in part] for part in (counted[:half], counted[-half:]))
    return Growth(
        round(counted[-1][0] - counted[0][0], 1),
        (_median(one.own_bytes for one in first), _median(one.own_bytes for one in last)),
    )


def _median(values: Iterable[int]) -> int:
    return round(median(values))
