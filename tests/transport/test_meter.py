from __future__ import annotations

import pytest

from prfaas.transport.meter import LEAST_BUSY_S, Meter
from prfaas.types import LinkStats


def said(
    meter: Meter, now: float, *, acknowledged: int, busy_s: float, backlog: int = 0
) -> LinkStats:
    return meter.report(
        now,
        [],
        acknowledged_bytes=acknowledged,
        backlog_bytes=backlog,
        in_flight_bytes=0,
        busy_s=busy_s,
    )


def test_goodput_is_of_all_time_and_delivery_of_the_busy_part() -> None:
    meter = Meter("b:7400", 10.0)
    stats = said(meter, 11.0, acknowledged=1000, busy_s=0.25, backlog=2000)
    assert stats.goodput_bps == 8000
    assert stats.delivery_bps == pytest.approx(32_000)
    assert stats.drain_s == pytest.approx(0.5)
    idle = said(meter, 12.0, acknowledged=1000, busy_s=0.25)
    assert (idle.goodput_bps, idle.delivery_bps, idle.drain_s) == (0, None, 0)


def test_a_transfer_that_has_just_begun_is_no_stop() -> None:
    meter = Meter("b:7400", 0.0)
    first = said(meter, 1.0, acknowledged=0, busy_s=LEAST_BUSY_S / 2, backlog=5000)
    assert first.drain_s == 0 and first.delivery_bps is None, "nothing is known yet"
    later = said(meter, 2.0, acknowledged=1000, busy_s=0.6, backlog=1000)
    assert later.drain_s == pytest.approx(0.6 - LEAST_BUSY_S / 2)
    again = said(meter, 3.0, acknowledged=1000, busy_s=0.7, backlog=1000)
    # What passed before counts with the tenth of a second in which nothing did.
    assert again.drain_s == pytest.approx(0.6) and again.delivery_bps is None


def test_a_stop_has_no_drain() -> None:
    meter = Meter("b:7400", 0.0)
    said(meter, 1.0, acknowledged=1000, busy_s=1.0, backlog=9000)
    stopped = said(meter, 2.0, acknowledged=1000, busy_s=2.0, backlog=9000)
    assert stopped.drain_s is None and stopped.delivery_bps == 0
