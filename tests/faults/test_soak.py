from __future__ import annotations

from dataclasses import replace

from prfaas.faults.growth import Growth
from prfaas.faults.soak import SoakReport

FLAT = Growth(600.0, (100 << 20, 101 << 20))
WELL = SoakReport(
    600.0,
    requests=10,
    verdicts={"right": 7, "left": 2, "broken": 1},
    routes={"local": 5, "remote": 3},
    errors={},
    wrong=[],
    untold=[],
    unmended=[],
    faults={"wan-cut": 1},
    skipped={},
    growth={"gateway-0": FLAT},
    grown=[],
    short_lived=[],
    sockets={"gateway-0": (20, 22)},
    checked=["pd-0"],
)


def test_a_soak_is_well_when_everything_is_accounted_for() -> None:
    assert WELL.ok
    for unwell in (
        replace(WELL, requests=11),
        replace(WELL, wrong=["one"]),
        replace(WELL, untold=["one"]),
        replace(WELL, unmended=["one"]),
        replace(WELL, grown=["gateway-0"]),
        replace(WELL, sockets={"gateway-0": (20, 40)}),
        replace(WELL, faults={}),
    ):
        assert not unwell.ok
