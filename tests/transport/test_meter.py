from __future__ import annotations

from prfaas.lateness import never_late
from prfaas.transport.delivery import DeliveryReport
from prfaas.transport.meter import Meter
from prfaas.types import LinkStats


def report(meter: Meter, now: float, delivery: DeliveryReport, late_s: float = 0.0) -> LinkStats:
    return meter.report(
        now,
        [],
        delivery=delivery,
        backlog_bytes=2000,
        in_flight_bytes=0,
        late_since=(lambda _since_s: late_s) if late_s else never_late,
    )


def test_goodput_is_of_the_time_since_the_last_report() -> None:
    meter = Meter("b:7400", 10.0)
    first = report(meter, 11.0, DeliveryReport(1000, 0.5, 32_000.0), late_s=0.25)
    assert (first.goodput_bps, first.delivery_bps, first.waited_s) == (8000, 32_000, 0.5)
    assert (first.late_s, first.backlog_bytes) == (0.25, 2000)
    assert report(meter, 13.0, DeliveryReport(3000, 0.0, None)).goodput_bps == 8000
    idle = report(meter, 14.0, DeliveryReport(3000, 0.0, None))
    assert (idle.goodput_bps, idle.delivery_bps, idle.waited_s) == (0, None, 0)
