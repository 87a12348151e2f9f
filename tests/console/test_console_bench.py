"""What `bench/console.py` makes of its measurements."""

from __future__ import annotations

from tests.benches import bench

console = bench("console")


def measured(scenes: float, gateway: float) -> object:
    parts = {"scenes": scenes, "streams": 2.0, "explanations": 1.0, "gateway": gateway}
    return console.Measured(parts, 1.0, 5e3)


def test_the_cost_of_the_console_is_the_sum_of_its_parts() -> None:
    """And not of the gateway's other work, which varies more."""
    found = {0: [measured(0.0, 500.0)], 10: [measured(ms, 600.0) for ms in (1.0, 2.0, 30.0)]}
    without, with_all = console.summarise(found)
    assert (without["watchers"], without["console"]) == (0, 3.0)
    assert (with_all["watchers"], with_all["console"], with_all["largest"]) == (10, 5.0, 33.0)
    assert (with_all["scenes"], with_all["gateway"]) == (2.0, 600.0)
    assert (with_all["messages_per_s"], with_all["bytes_per_s"]) == (1, 5000)


def test_the_worst_case_compares_and_encodes_every_node() -> None:
    found = console.worst_case(20, repeats=3)
    assert found["bytes"] > 20 * 100 and found["ms"] >= 0
