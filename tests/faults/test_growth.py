from __future__ import annotations

from prfaas.faults.growth import OWN_BYTES, SETTLED_S, WARM_S, Growth, Sample, growing_processes
from prfaas.faults.resource_usage import ResourceUsage

STEPS = 40


def samples(own: list[int], pids: list[int]) -> list[Sample]:
    return [
        Sample(10.0 * n, {"p": ResourceUsage(pid, 5, size)})
        for n, (size, pid) in enumerate(zip(own, pids, strict=True))
    ]


def life(own: list[int]) -> Growth:
    return Growth.of(samples(own, [1] * STEPS))["p"]


def test_a_process_that_reaches_its_size_is_flat() -> None:
    warming = [min(n, 10) << 24 for n in range(STEPS)]
    assert life(warming).flat
    assert life([(100 << 20) + (n % 3 << 20) for n in range(STEPS)]).flat


def test_a_leak_is_not() -> None:
    assert not life([n * OWN_BYTES // 8 for n in range(STEPS)]).flat
    five_a_minute = [(84 << 20) + n * (5 << 20) // 6 for n in range(STEPS)]
    assert not life(five_a_minute).flat


def test_the_longest_life_counts_and_a_short_one_says_nothing() -> None:
    pids = [1] * 30 + [2] * 10
    found = Growth.of(samples([n << 28 for n in range(STEPS)], pids))["p"]
    assert found.seconds >= SETTLED_S and found.own_bytes[1] < 30 << 28
    assert found.judged and not found.flat
    few = Growth.of(samples([0, 1 << 30], [1, 1]))["p"]
    assert not few.judged and few.flat


def test_stores_that_fill_in_the_beginning_do_not_count() -> None:
    """Of a short life not its first third only."""
    steps = int(WARM_S + SETTLED_S) // 10 + 2
    filling = [min(10 * n, int(WARM_S)) << 20 for n in range(steps)]
    found = Growth.of(samples(filling, [1] * steps))["p"]
    assert found.judged and found.flat


def test_a_young_process_may_become_as_large_as_an_old_one_that_stays() -> None:
    old, young = Growth(1200.0, (64 << 20, 64 << 20)), Growth(300.0, (50 << 20, 60 << 20))
    assert growing_processes({"kvd-a": old, "kvd-b": young}) == []
    assert growing_processes({"kvd-b": young}) == ["kvd-b"]
    assert growing_processes({"a": old, "kvd-b": young}) == ["kvd-b"], "another kind says nothing"
    assert growing_processes({"kvd-a": old, "kvd-b": Growth(300.0, (50 << 20, 70 << 20))}) == [
        "kvd-b"
    ]
    assert growing_processes({"kvd-a": Growth(1200.0, (50 << 20, 80 << 20)), "kvd-b": young}) == [
        "kvd-a",
        "kvd-b",
    ]
