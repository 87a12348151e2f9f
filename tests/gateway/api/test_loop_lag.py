from __future__ import annotations

from prfaas.gateway.api.loop_lag import LargestLag


def test_the_largest_lag_is_forgotten_after_two_minutes() -> None:
    largest = LargestLag()
    for now_s, lag_s in ((10.0, 0.5), (20.0, 0.2), (70.0, 0.1)):
        largest.observe(lag_s, now_s)
    assert largest.at(70.0) == largest.at(119.0) == 0.5
    assert largest.at(130.0) == 0.1
    assert largest.at(500.0) == 0.0
