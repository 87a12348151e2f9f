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


STEADY_SIZE, GROWING = (64 << 20, 64 << 20), (50 << 20, 60 << 20)


def test_a_process_may_become_as_large_as_another_one_of_its_cluster_that_stays() -> None:
    for steady_s in (300.0, 1200.0, 1500.0):
        steady, growing = Growth(steady_s, STEADY_SIZE), Growth(1200.0, GROWING)
        assert growing_processes({"kvd-east-0": steady, "kvd-east-1": growing}) == []
        assert growing_processes({"worker-east-0-0": steady, "worker-east-1-0": growing}) == []
        assert growing_processes({"east-0": steady, "kvd-east-1": growing}) == ["kvd-east-1"]
    old, young = Growth(1200.0, STEADY_SIZE), Growth(300.0, GROWING)
    assert growing_processes({"kvd-a-1": young}) == ["kvd-a-1"]
    larger = Growth(300.0, (50 << 20, 70 << 20))
    assert growing_processes({"kvd-a-0": old, "kvd-a-1": larger}) == ["kvd-a-1"]
    both = {"kvd-a-0": Growth(1200.0, (50 << 20, 80 << 20)), "kvd-a-1": young}
    assert growing_processes(both) == ["kvd-a-0", "kvd-a-1"]


def test_of_other_clusters_only_an_older_process_shows_what_size_is_usual() -> None:
    """A gateway that follows may be larger than the one that plans, and a kvd whose node decodes
    larger than one whose node prefills: a leak below that size must not be excused for ever."""
    growing = Growth(900.0, GROWING)
    for names in (("gateway-east", "gateway-west"), ("kvd-north-0", "kvd-east-0")):
        steady, leaks = names
        assert growing_processes({steady: Growth(1200.0, STEADY_SIZE), leaks: growing}) == []
        for seconds in (300.0, 900.0):
            found = growing_processes({steady: Growth(seconds, STEADY_SIZE), leaks: growing})
            assert found == [leaks]


def test_a_size_at_which_no_process_was_seen_to_stay_excuses_nothing() -> None:
    growing = Growth(600.0, (50 << 20, 60 << 20))
    short = Growth(SETTLED_S - 1, (80 << 20, 80 << 20))
    assert not short.judged
    assert growing_processes({"kvd-a-0": short, "kvd-a-1": growing}) == ["kvd-a-1"]


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
    found = growing_processes({"kvd-a-0": late, "kvd-a-1": middle, "kvd-a-2": first})
    assert "kvd-a-2" in found
