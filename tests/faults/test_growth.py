from __future__ import annotations

from prfaas.faults.growth import OWN_BYTES, SETTLED_S, SOCKETS, Growth, Sample
from prfaas.faults.traces import Held

STEPS = 40


def samples(own: list[int], sockets: list[int], pids: list[int]) -> list[Sample]:
    return [
        Sample(10.0 * n, {"p": Held(pid, held, size)})
        for n, (size, held, pid) in enumerate(zip(own, sockets, pids, strict=True))
    ]


def grown(own: list[int], sockets: list[int] | None = None) -> Growth:
    return Growth.of(samples(own, sockets or [5] * STEPS, [1] * STEPS))["p"]


def test_a_process_that_reaches_its_size_is_flat() -> None:
    warming = [min(n, 10) << 24 for n in range(STEPS)]
    assert grown(warming).flat
    assert grown([(100 << 20) + (n % 3 << 20) for n in range(STEPS)]).flat


def test_a_leak_is_not() -> None:
    assert not grown([n * OWN_BYTES // 8 for n in range(STEPS)]).flat
    assert not grown([1 << 20] * STEPS, [2 * n * SOCKETS // STEPS for n in range(STEPS)]).flat


def test_the_longest_life_counts_and_a_short_one_says_nothing() -> None:
    pids = [1] * 30 + [2] * 10
    found = Growth.of(samples([n << 28 for n in range(STEPS)], [5] * STEPS, pids))["p"]
    assert found.seconds >= SETTLED_S and found.own_bytes[1] < 30 << 28 and not found.flat
    few = Growth.of(samples([0, 1 << 30], [5, 500], [1, 1]))["p"]
    assert few.seconds < SETTLED_S and few.flat
