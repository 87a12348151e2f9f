from __future__ import annotations

from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.types import NodeId

LIVE = frozenset({NodeId("pd-0")})


def test_a_window_has_the_recorded_requests_in_order() -> None:
    traffic = TrafficHistory(started_s=5.0, window_s=100.0)
    traffic.observe(10.0, 300, 20, 7, 0.5)
    traffic.observe(11.0, 100, 0, 9, 1.5)
    window = traffic.window(20.0, (4,), LIVE)
    assert window.started_s == 5.0
    assert window.at_s.tolist() == [10.0, 11.0]
    assert window.new_tokens.tolist() == [300, 100]
    assert window.cached_tokens.tolist() == [20, 0]
    assert window.output_tokens.tolist() == [7, 9]
    assert (window.live_remotes, window.live_local) == ((4,), LIVE)


def test_requests_older_than_the_window_are_dropped() -> None:
    traffic = TrafficHistory(started_s=0.0, window_s=10.0)
    for second in range(50):
        traffic.observe(float(second), second + 1, 0, 1, 0.0)
    assert traffic.window(50.0, (), LIVE).at_s.tolist() == [float(s) for s in range(40, 50)]
    # An earlier window stays as it was while the traffic goes on.
    before = traffic.window(50.0, (), LIVE)
    traffic.observe(60.0, 1, 0, 1, 0.0)
    assert traffic.window(60.0, (), LIVE).at_s.tolist() == [60.0]
    assert len(before.at_s) == 10


def test_the_summary_of_a_window() -> None:
    traffic = TrafficHistory(started_s=0.0, window_s=10.0)
    assert traffic.summarise(1.0) is None
    for second in range(30):
        traffic.observe(float(second), 100, 10 * (second % 2), 7, second % 2)
    seen = traffic.summarise(30.0)
    assert seen == (10, 1.0, 100.0, 5.0, 7.0, 0.5, 1.0)
    young = TrafficHistory(started_s=50.0, window_s=100.0)
    young.observe(51.0, 1, 0, 1, 0.0)
    found = young.summarise(52.0)
    assert found is not None and found.rps == 0.5, "it has not been there for a whole window"


def test_memory_is_bounded_without_replanning() -> None:
    traffic = TrafficHistory(0.0, 10.0)
    for at_s in range(1000):
        traffic.observe(float(at_s), 1, 0, 1, 0.0)
    assert max(len(column) for column in traffic._columns) <= 21
