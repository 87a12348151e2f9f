"""Links as the gateway sees them, in base units."""

from __future__ import annotations

from prfaas.gateway.exposition.links import ObservedLink, link_metrics
from prfaas.scheduler.congestion import LinkHealth, LinkVerdict
from prfaas.scheduler.state import LinkState
from prfaas.scheduler.view import LinkView
from prfaas.types import ClusterId, LinkStats

LINK = (ClusterId("far"), ClusterId("near"))


def values(link: ObservedLink) -> dict[str, float]:
    found = {}
    for family in link_metrics([link]):
        for sample in family.samples:
            assert sample.labels == {"source": "far", "target": "near"}
            found[sample.name.removeprefix("prfaas_gateway_link_")] = sample.value
    return found


def test_rates_are_bytes_and_missing_values_are_absent() -> None:
    idle = LinkView(True, 8e9, 0.03, None, 0.0)
    found = values(ObservedLink(LINK, idle, LinkState(), 0))
    assert found == {
        **{"up": 1, "cuts_total": 0, "verdict": 0, "capacity_bytes_per_second": 1e9},
        **{"goodput_bytes_per_second": 0, "backlog_bytes": 0, "pending_bytes": 0},
        **{"waited_seconds": 0, "rtt_seconds": 0.03},
    }


def test_a_congested_link() -> None:
    stats = LinkStats("peer", 1.0, 4, 8e6, 1000, 10, waited_s=2.5, rtt_s=0.2)
    full = LinkView(False, 8e9, 0.03, stats, 5000.0)
    health = LinkHealth(LinkVerdict.CONGESTED, "loss", loss=0.01)
    found = values(ObservedLink(LINK, full, LinkState(health, 1.6e7), 3))
    assert (found["up"], found["verdict"], found["cuts_total"]) == (0, 2, 3)
    assert found["estimated_bytes_per_second"] == 2e6
    assert found["goodput_bytes_per_second"] == 1e6
    assert (found["backlog_bytes"], found["pending_bytes"]) == (1000, 5000)
    assert (found["waited_seconds"], found["rtt_seconds"]) == (2.5, 0.2)
    assert found["loss_ratio"] == 0.01
