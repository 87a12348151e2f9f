"""What `bench agree` concludes. The runs themselves are `make agree`."""

from __future__ import annotations

from typing import Any

from prfaas.demo.small_case import FirstTokenStats
from tests.benches import bench

agree = bench("agree")


def row(system: str, live: float, simulated: float, counted: int = 320, **changed: Any) -> Any:
    fields = {
        "live": FirstTokenStats(counted, live, 1.0, 2.0),
        "simulated": FirstTokenStats(320, simulated, 1.0, 2.0),
        "planned_rps": 3.0,
        "live_egress_gbps": None,
        "simulated_egress_gbps": None,
        "failures": {},
        "cpu_share": 0.4,
    }
    return agree.Row(system, **(fields | changed))


def rows(**changed: Any) -> list[Any]:
    return [
        row("prfaas_pd", 3.1, 3.0, live_egress_gbps=12.0, simulated_egress_gbps=11.8, **changed),
        row("homogeneous", 2.0, 2.0),
        row("naive", 2.4, 2.4, live_egress_gbps=12.0, simulated_egress_gbps=12.1),
    ]


def test_agreement_holds_for_each_figure() -> None:
    found = agree.checks(rows())
    assert len(found) == 1 + 3 + 3 + 2 and all(check.held for check in found)
    assert agree.void_because(rows()) is None


def test_each_disagreement_is_named() -> None:
    bad = [
        row("prfaas_pd", 2.6, 3.0, live_egress_gbps=14.0, simulated_egress_gbps=12.0),
        row("homogeneous", 2.0, 0.0, failures={"HTTP 500": 2}),
        row("naive", 2.4, 2.4, counted=90),
    ]
    failed = [check.claim for check in agree.checks(bad) if not check.held]
    assert failed == [
        "at least 300 first tokens are counted of each",
        "homogeneous PD: no request fails",
        "PrfaaS-PD: throughput within 10% of the simulator's",
        "PrfaaS-PD: egress within 10% of the simulator's",
        "homogeneous PD: throughput within 10% of the simulator's",
    ]


def test_a_busy_machine_voids_the_run() -> None:
    why = agree.void_because(rows(cpu_share=0.93))
    assert why is not None and "93% during PrfaaS-PD" in why


def test_ratios_stand_beside_the_papers() -> None:
    found = agree.ratios(rows())
    assert found["prfaas_over_homogeneous"] == {"live": 1.55, "simulated": 1.5, "published": 1.54}
    assert found["prfaas_over_naive"]["published"] == 1.32
