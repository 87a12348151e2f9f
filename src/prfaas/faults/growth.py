"""Decides from samples of memory whether a process grows without limit. Pure.

A process needs some time to reach its size, because caches and stores fill. So the first third of
its run time, and at least `WARM_S`, does not count. In the rest, the second half may not be larger
than the first, unless a comparable process is steady at a size that this process has not exceeded.
Comparable are processes of the same kind: those of the same cluster, whatever their age, and those
of other clusters that have run longer. Processes of one kind have different work: a gateway plans
or follows, a kvd belongs to a node that prefills or decodes. So a leak of one of them is found only
once it exceeds the steady ones that it is compared with. A leak in all processes of a kind is found
earlier: the one that has run longest exceeds all that are still steady.

    start ── does not count ── max(WARM_S, 1/3) ── median ── middle ── median ── end
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from prfaas.faults.resource_usage import ResourceUsage

WARM, WARM_S = 1 / 3, 120.0  # bounded stores are full by then, at the rate of a soak
SETTLED_S = 45.0  # a shorter rest is not judged
# A process has grown when it exceeds both. Medians of a steady process differ by 2 MiB.
OWN_SHARE, OWN_BYTES = 0.03, 4 << 20


class Sample(NamedTuple):
    at_s: float
    held: Mapping[str, ResourceUsage]  # by process


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one process between two restarts, in its longest run."""

    seconds: float  # compared
    own_bytes: tuple[int, int]  # medians of the first and the second half

    @property
    def judged(self) -> bool:
        """Whether the run was long enough to be judged."""
        return self.seconds >= SETTLED_S

    @property
    def flat(self) -> bool:
        if not self.judged:
            return True
        first, last = self.own_bytes
        return last - first <= max(OWN_BYTES, OWN_SHARE * first)

    @staticmethod
    def of(samples: Sequence[Sample]) -> dict[str, Growth]:
        """Growth by the name of the process."""
        runs: dict[tuple[str, int], list[tuple[float, ResourceUsage]]] = {}
        for sample in samples:
            for name, one in sample.held.items():
                runs.setdefault((name, one.pid), []).append((sample.at_s, one))
        longest: dict[str, Growth] = {}
        for (name, _), run in runs.items():
            growth = _growth(run)
            if name not in longest or growth.seconds > longest[name].seconds:
                longest[name] = growth
        return longest


def growing_processes(growth: Mapping[str, Growth]) -> list[str]:
    """Processes that have grown and may grow further."""

    def is_comparable(its: str, other: Growth, name: str) -> bool:
        if _kind(its) != _kind(name):
            return False
        return _cluster(its) == _cluster(name) or other.seconds > growth[name].seconds

    def may_reach(name: str) -> int:
        steady = [
            other.own_bytes[1]
            for its, other in growth.items()
            if is_comparable(its, other, name) and other.judged and other.flat
        ]
        return max(steady, default=0)

    return [
        name for name, one in growth.items() if not one.flat and one.own_bytes[1] > may_reach(name)
    ]


def _kind(name: str) -> str:
    """Names of kvds, their workers, gateways and relays begin with their kind; an engine has its
    node's name."""
    first = name.partition("-")[0]
    return first if first in ("kvd", "worker", "gateway", "wan") else "node"


def _cluster(name: str) -> str:
    """The name without its numbers, for processes of one kind: kvd-east-0 and kvd-east-1 belong to
    one cluster, and so do worker-east-0-0 and worker-east-1-0."""
    return re.sub(r"(-\d+)+$", "", name)


def _growth(run: Sequence[tuple[float, ResourceUsage]]) -> Growth:
    start_s, end_s = run[0][0], run[-1][0]
    from_s = start_s + max(WARM_S, WARM * (end_s - start_s))
    counted = [one for one in run if one[0] >= from_s] or run[-1:]
    half = max(1, len(counted) // 2)
    first, last = ([one for _, one in part] for part in (counted[:half], counted[-half:]))
    return Growth(
        round(counted[-1][0] - counted[0][0], 1),
        (_median(one.own_bytes for one in first), _median(one.own_bytes for one in last)),
    )


def _median(values: Iterable[int]) -> int:
    return round(median(values))
