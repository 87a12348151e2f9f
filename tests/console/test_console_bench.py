"""What `bench/console.py` makes of its measurements."""

from __future__ import annotations

import os

from tests.benches import bench

console = bench("console")


def test_the_cost_is_the_difference_from_the_same_round() -> None:
    """The machine is slower in the second round, with and without watchers."""
    found = {
        0: [console.Measured(cpu, 0.0, 0.0) for cpu in (100.0, 150.0, 101.0)],
        10: [console.Measured(cpu, 1.0, 5e3) for cpu in (106.0, 157.0, 106.0)],
    }
    without, with_all = console.summarise(found)
    assert (without["watchers"], without["cpu_ms_per_s"], without["added_ms_per_s"]) == (0, 101, 0)
    assert (with_all["watchers"], with_all["added_ms_per_s"]) == (10, 6)
    assert with_all["added_quartiles"] == [5.5, 6.5]
    assert (with_all["messages_per_s"], with_all["bytes_per_s"]) == (1, 5000)


def test_a_process_has_used_cpu_time() -> None:
    assert console.Gateway(os.getpid(), "http://127.0.0.1:1").cpu_s() > 0
