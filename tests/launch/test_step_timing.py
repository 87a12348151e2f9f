from __future__ import annotations

from prfaas.engine.api import EngineLimits, EngineStats, StepTiming
from prfaas.launch.step_timing import parse_timing, sum_of
from prfaas.node.metrics import NodeMetrics


def page(metrics: NodeMetrics, timing: StepTiming | None) -> str:
    return metrics.render(lambda: EngineStats(0, 0, 0, 0, timing), 0).decode()


def test_a_nodes_page_tells_how_late_its_emulated_steps_were() -> None:
    metrics = NodeMetrics("m", 64, EngineLimits(4096, 256, 8, 16))
    first, second = StepTiming(2, 0.5, 0.125), StepTiming(6, 2.5, 0.25)
    assert parse_timing(page(metrics, first)) == first
    assert parse_timing(page(metrics, second)) == second
    assert parse_timing(page(metrics, second)) == second  # counters, not sums of reads


def test_a_real_engines_page_has_no_such_counters() -> None:
    shown = page(NodeMetrics("m", 64, EngineLimits(4096, 256, 8, 16)), None)
    assert "prfaas_emulated" not in shown and parse_timing(shown) == StepTiming()


def test_engines_are_added_up() -> None:
    assert sum_of([StepTiming(1, 2.0, 3.0), StepTiming(4, 5.0, 6.0)]) == StepTiming(5, 7.0, 9.0)
    assert sum_of([]) == StepTiming()
