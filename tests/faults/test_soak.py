from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas_lab.faults.actors.situation import ACTORS, ActorsReport, DeedCounts
from prfaas_lab.faults.growth import Growth, Slope
from prfaas_lab.faults.soak import CLUSTER_FAULT_S, Soak, SoakOptions, SoakReport, Ttft
from tests.benches import bench
from tests.complaints import check_output
from tests.faults.conftest import FaultSetup

FLAT = Growth(600.0, 100 << 20, Slope(2e5, 1e5), judged=True)
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
        replace(WELL, unexcused=["one"]),
        replace(WELL, untold=["one"]),
        replace(WELL, unmended=["one"]),
        replace(WELL, grown=["gateway-0"]),
        replace(WELL, sockets={"gateway-0": (20, 40)}),
        replace(WELL, faults={}),
    ):
        assert not unwell.ok


def test_a_soak_that_kills_workers_has_killed_some() -> None:
    assert replace(WELL, killed_workers=3).ok
    assert replace(WELL, killed_workers=0).problems == ["no worker was killed"]


def test_a_soak_of_several_clusters_has_struck_one_of_them() -> None:
    several = replace(WELL, with_cluster_faults=True)
    assert several.problems == ["no cluster-wide fault has struck"]
    assert replace(several, faults={"wan-cut": 1, "pd-cluster-killed": 1}).ok
    assert replace(several, seconds=CLUSTER_FAULT_S - 1).ok, "too short for one"


CALM = replace(WELL, verdicts={"right": 8, "left": 2}, faults={}, with_faults=False)
SEEN = ActorsReport(600.0, 0.2, {"tenant: x": DeedCounts(1, {"HTTP 400": 1})}, [])


def test_without_faults_every_request_must_be_answered() -> None:
    assert CALM.ok
    for lost in ("refused", "broken", "lost"):
        unwell = replace(CALM, verdicts={"right": 9, lost: 1})
        assert unwell.problems == ["requests are lost"]


def test_a_soak_with_actors_is_well_when_services_refuse_them_in_time() -> None:
    assert replace(CALM, actors=SEEN).ok
    for deeds in (DeedCounts(1, {"HTTP 500": 1}), DeedCounts(1, {"neither": 1}, overdue=1)):
        seen = ActorsReport(600.0, 0.2, {"tenant: x": deeds}, [])
        assert not replace(CALM, actors=seen).ok
    assert not replace(CALM, actors=ActorsReport(600.0, 0.5, {}, [])).ok
    assert not replace(CALM, actors=ActorsReport(600.0, 0.2, {}, ["a defect"])).ok


def test_ttft_quantiles() -> None:
    assert Ttft.of([]) is None
    assert Ttft.of([float(n) for n in range(101)]) == Ttft(101, 50.0, 90.0, 99.0)


def test_the_benchmark_compares_the_soak_beside_actors_with_the_one_without() -> None:
    ratio = bench("hostile_soak").ratio_of_p90
    without = replace(CALM, ttft=Ttft(10, 0.5, 1.0, 2.0))
    assert ratio(without, replace(CALM, ttft=Ttft(10, 0.5, 1.25, 9.0))) == 1.25
    assert ratio(without, CALM) is None, "no answer is not a good answer"


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_hostile_actors_do_not_harm_ordinary_tenants(emulated_setup: FaultSetup) -> None:
    """A soak of twenty seconds: every answer is right, and every attack is refused or served in
    time. How much later first tokens come is measured by bench/hostile_soak.py."""
    deployment, campaign = emulated_setup.deployment, emulated_setup.campaign
    options = SoakOptions(seconds=20.0, faults=False, actors=ACTORS, conversations=4)
    report = emulated_setup.run(Soak(deployment, campaign.lengths, options, print).run())
    assert report.problems == [], report
    assert report.requests and report.ttft is not None and report.actors is not None
    # The actors did what they are for: otherwise nothing is proved.
    seen = report.actors
    assert "HTTP 200" in seen.answers("member: heartbeats"), "fake kvds have registered"
    assert "granted" in seen.answers("peer: grant abandoned")
    assert "closed" in seen.answers("peer: data, no grant")
    assert "HTTP 404" in seen.answers("tenant: short requests")
    logs = "\n".join(path.read_text() for path in emulated_setup.folder.glob("*.log"))
    assert "Traceback" not in logs and "internal_error" not in logs
    check_output(logs)
