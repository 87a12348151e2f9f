import pytest

from prfaas.clock import Clock, MonotonicClock
from prfaas_lab.testing import FakeClock


def test_a_fake_clock_moves_only_when_told() -> None:
    clock: Clock = FakeClock(5.0)
    assert clock.now() == clock.now() == 5.0
    assert isinstance(clock, FakeClock)
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_the_real_clock_never_goes_back() -> None:
    clock: Clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
