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


def test_a_process_may_become_as_large_as_another_one_that_stays() -> None:
    old, young = Growth(1200.0, (64 << 20, 64 << 20)), Growth(300.0, (50 << 20, 60 << 20))
    assert growing_processes({"kvd-a": Growth(300.0, old.own_bytes), "kvd-b": young}) == []
    older = Growth(1500.0, young.own_bytes)
    assert growing_processes({"kvd-a": old, "kvd-b": older}) == [], "age does not matter, size does"
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


def test_a_size_at_which_no_process_was_seen_to_stay_excuses_nothing() -> None:
    growing = Growth(600.0, (50 << 20, 60 << 20))
    short = Growth(SETTLED_S - 1, (80 << 20, 80 << 20))
    assert not short.judged
    assert growing_processes({"kvd-a": short, "kvd-b": growing}) == ["kvd-b"]


def test_a_leak_in_all_processes_of_a_kind_is_found_whatever_their_ages() -> None:
    """The one that has run longest is the largest, and is not steady. One that was restarted late
    may look steady, at a smaller size."""

    def leaking(run_s: float) -> Growth:
        run = [
            Sample(at_s, {"p": ResourceUsage(1, 5, (50 << 20) + int(at_s * (1 << 20) / 30))})
            for at_s in range(0, int(run_s) + 1, 5)
        ]
        return Growth.of(run)["p"]

    late, middle, first = leaking(200.0), leaking(500.0), leaking(900.0)
    assert late.judged and late.flat
    found = growing_processes({"kvd-late": late, "kvd-middle": middle, "kvd-first": first})
    assert "kvd-first" in found
