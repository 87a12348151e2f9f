"""The study at scale: its day, its baseline, its deployment file and its script."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from prfaas.config import load_deployment
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.studies.network_plans import NetworkStudy
from prfaas_lab.studies.regional_day import (
    RegionalDay,
    alone_for_the_same_money,
    draw_day,
    hourly_usd,
    largest_day,
    shrunk,
)
from tests.benches import bench

ROOT = Path(__file__).parents[3]
FILE = ROOT / "configs" / "four_by_three.toml"
STUDY = bench("scale_study")
DAY = RegionalDay(STUDY.UTC_OFFSETS_H, trough=0.4, busiest_hour=15.0)
# Latitude and longitude in degrees.
PLACES = {
    "virginia": (39.0, -77.5),
    "frankfurt": (50.1, 8.7),
    "tokyo": (35.7, 139.7),
    "sao-paulo": (-23.5, -46.6),
    "oregon": (45.8, -119.7),
    "stockholm": (59.3, 18.1),
    "johor": (1.5, 103.8),
}


@pytest.fixture(scope="module")
def network() -> NetworkProblem:
    return NetworkStudy(FILE, "exact").network(load_deployment(FILE))


def great_circle_km(one: str, other: str) -> float:
    (lat, lon), (lat2, lon2) = (tuple(map(math.radians, PLACES[name])) for name in (one, other))
    part = math.sin((lat - lat2) / 2) ** 2
    part += math.cos(lat) * math.cos(lat2) * math.sin((lon - lon2) / 2) ** 2
    return 2 * 6371 * math.asin(math.sqrt(part))


def test_the_deployment_is_what_the_study_says(network: NetworkProblem) -> None:
    assert sum(pool.gpus for pool in network.pools) == 10_000
    assert len(network.homes) == 4 and len(network.prfaas_pools) == 3


def test_round_trips_follow_from_distances() -> None:
    links = [link for link in load_deployment(FILE).links if link.source != link.target]
    assert len(links) > 11
    for link in links:
        there_and_back_s = 2 * 1.5 * great_circle_km(link.source, link.target) / 200_000
        assert link.rtt_ms == 5 * round(there_and_back_s * 1e3 / 5), (link.source, link.target)


def test_demand_follows_local_time(network: NetworkProblem) -> None:
    tokyo = [home.cluster for home in network.homes].index("tokyo")
    share = network.homes[tokyo].share
    at = [DAY.demand(network, hour)[tokyo] / share for hour in range(24)]
    assert at[6] == pytest.approx(1.0), "15:00 in Tokyo"
    assert at[18] == pytest.approx(0.4), "3:00 in Tokyo"
    assert at[0] == pytest.approx(0.7), "halfway"
    total = [float(DAY.demand(network, hour).sum()) for hour in range(24)]
    assert DAY.busiest(network) == total.index(max(total))


def test_requests_of_a_day_follow_its_demand(network: NetworkProblem) -> None:
    arrivals = draw_day(network, DAY, peaks_rps=400.0, speed=2000.0, seed=0)
    assert arrivals.homes is not None and np.all(np.diff(arrivals.at_s) >= 0)
    assert arrivals.at_s[-1] <= 86_400 / 2000
    hours = (arrivals.at_s * 2000 / 3600).astype(int)
    for hour in (6, 18):
        expected = DAY.demand(network, hour + 0.5) * 400 * 3600 / 2000
        counted = np.bincount(arrivals.homes[hours == hour], minlength=4)
        assert np.all(np.abs(counted - expected) < 5 * np.sqrt(expected))


def test_alone_costs_no_more_and_serves_its_peaks(network: NetworkProblem) -> None:
    planner, small = NetworkPlanner("exact"), shrunk(network, 10)
    rate, alone = alone_for_the_same_money(planner, small)
    assert not alone.prfaas_pools
    assert 0.95 * hourly_usd(small) < hourly_usd(alone) <= hourly_usd(small) * (1 + 1e-9)
    assert planner.rate_rps(alone) == pytest.approx(rate, rel=1e-6)


def test_a_day_fits_where_each_of_its_hours_does(network: NetworkProblem) -> None:
    planner, small = NetworkPlanner("exact"), shrunk(network, 10)
    rate, hour = largest_day(planner, small, DAY, (6, 18))
    assert hour == 18
    assert rate * DAY.demand(small, 18).sum() == pytest.approx(planner.rate_rps(DAY.at(small, 18)))
    assert rate > planner.rate_rps(small), "regions that are busy at different hours share PrfaaS"


@pytest.mark.parametrize(
    ("p90", "after_s"),
    [
        ([9, 2, 2, 2, 5, 5, 3, 2, 2, 2, 9], 10.0),  # lost from bin 4 on, back from bin 6 on
        ([9, 2, 2, 2, 2, 2, 2, 2, 2, 2, 9], 0.0),
        ([9, 2, 2, 2, None, None, 5, 2, 2, 2, 9], 10.0),
        ([9, 2, 2, 2, 5, 5, 5, 5, 5, 5, 9], None),
    ],
)
def test_steady_again(p90: list[float | None], after_s: float | None) -> None:
    calm: list[float | None] = [1.0] * len(p90)
    found = STUDY.recovery({"one": calm, "other": p90}, 40.0, 60.0)
    assert found["steady_after_s"] == after_s


@pytest.mark.grid
def test_the_script_fills_its_page(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "scale.md", tmp_path)
    arguments = ["--quick", "--workers", "1", "--docs", str(tmp_path)]
    file = tmp_path / "report.json"
    found = CliRunner().invoke(STUDY.main, [*arguments, "--report", str(file)])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report == json.loads(file.read_text(encoding="utf-8"))
    assert report["capacity"]["gain"] > report["capacity"]["steady_gain"] > 1
    assert report["bandwidth"]["1.0"]["gain"] > report["bandwidth"]["0.125"]["gain"]
    lost = report["simulated"]["lost pd"]
    assert lost["elsewhere_during"] > 0.1 and lost["broken_streams"] and not lost["unserved"]
    page = (tmp_path / "scale.md").read_text(encoding="utf-8")
    for name in re.findall(r"<!-- begin (.*?) -->", page):
        block = re.search(rf"<!-- begin {name} -->\n(.+?)<!-- end {name} -->", page, re.DOTALL)
        assert block is not None and len(block[1]) > 80, name
    for picture in re.findall(r"\((img/.*?\.png)\)", page):
        assert (tmp_path / picture).stat().st_size > 5_000
