"""What `bench agree` concludes. The runs themselves are `make agree`."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prfaas.demo.small_case import FirstTokenStats
from prfaas.engine.emulated.pace import Scales
from prfaas.scheduler.homes.plans import solve_network
from prfaas.sim.arrivals import poisson_at_homes
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


# Several PD clusters -------------------------------------------------------------------------

regions = bench("_agree_regions")


def agreement(**changed: Any) -> Any:
    def home(name: str, live: float, simulated: float, counted: int = 200) -> Any:
        stats = [FirstTokenStats(counted, rps, 1.0, 2.0) for rps in (live, simulated)]
        return regions.HomeRow(name, *stats, 2.0)

    fields = {
        "homes": [home("east", 2.05, 2.0), home("west", 1.0, 1.0), home("total", 3.05, 3.0)],
        "links": [
            regions.LinkRow("north", "east", 50.0, 4.1, 4.0),
            regions.LinkRow("east", "west", 5.0, 0.001, 0.0),
        ],
        "failures": {},
        "cpu_share": 0.4,
    }
    return regions.Agreement(**(fields | changed))


def test_pd_clusters_and_links_agree() -> None:
    found = regions.region_checks(agreement())
    assert len(found) == 2 + 3 + 2 and all(check.held for check in found)
    assert regions.void_because(agreement()) is None
    assert "61%" in regions.void_because(agreement(cpu_share=0.61))


def test_each_disagreement_of_a_pd_cluster_or_link_is_named() -> None:
    links = [
        regions.LinkRow("north", "east", 50.0, 4.4, 4.0),
        regions.LinkRow("east", "west", 5.0, 0.2, 0.0),
    ]
    homes = list(agreement().homes)
    homes[1] = dataclasses.replace(homes[1], live=FirstTokenStats(90, 1.2, 1.0, 2.0))
    bad = agreement(links=links, homes=homes, failures={"HTTP 500": 1})
    failed = [check.claim for check in regions.region_checks(bad) if not check.held]
    assert failed == [
        "at least 100 first tokens are counted of each PD cluster",
        "no request fails",
        "west: throughput within 5% of the simulator's",
        "north -> east: egress within 5% of the simulator's",
        "east -> west: no KV, as simulated",
    ]


def test_two_pd_clusters_simulated_beside_themselves(tmp_path: Path) -> None:
    """Rows and checks from a simulation that stands for the live run, too."""
    scales = Scales(2.0, 1 / 128, 1 / 32)
    case = regions.two_by_two(tmp_path, scales, "paper")
    plan = solve_network(case.problem)
    arrivals = poisson_at_homes(case.problem, 1.2 * plan.rate_rps, 600, 0)
    result = regions.simulated(case, arrivals)
    rates = {home.cluster: home.rate_rps * scales.time for home in plan.homes}
    homes = regions.home_rows(
        case.homes, rates, arrivals, result.requests.first_token_s, result, scales
    )
    assert [row.home for row in homes] == ["east", "west", "total"]
    assert homes[0].live.counted + homes[1].live.counted == homes[2].live.counted
    assert homes[2].planned_rps == pytest.approx(plan.rate_rps * scales.time)
    sent = regions.sent_bps(result, float(arrivals.at_s[-1]))
    live = {
        (link.source, link.target): sent.get((link.source, link.target), 0.0)
        for link in case.deployment.links
    }
    links = regions.link_rows(case, live, sent, scales)
    assert len(links) == 6 and sum(link.simulated_gbps > 0.1 for link in links) == 4
    found = regions.Agreement(homes, links, {}, 0.1)
    assert all(check.held for check in regions.region_checks(found))
    screen = Console(width=120, record=True, file=io.StringIO())
    regions.show_regions(found, scales, screen)
    assert "south -> west" in screen.export_text()
