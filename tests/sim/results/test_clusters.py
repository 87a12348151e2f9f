from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.sim.results.clusters import (
    summarise_links,
    summarise_pd_clusters,
    summarise_prfaas_clusters,
)
from prfaas.sim.results.result import ClusterName, Result, RoleUse
from prfaas.sim.results.service_level import ServiceLevel
from prfaas.types import ClusterId
from tests.sim.made_results import result

LEVEL = ServiceLevel(2.0, 0.020)


def two_homes() -> Result:
    """100 requests, one a second, that arrive at `east` and `west` in turn. Every fourth, all of
    them of `east`, is prefilled at `north`. `west` has a long TTFT, and one request is never
    answered there; `east` decodes two of its requests."""
    made = result([1.0, 3.0] * 50)
    rows = made.requests
    first = rows.first_token_s.copy()
    first[99] = np.nan
    decode = np.arange(100) % 2
    decode[[51, 53]] = 0
    requests = replace(
        rows,
        first_token_s=first,
        home=np.arange(100) % 2,
        decode_cluster=decode,
        prefill_cluster=np.where(np.arange(100) % 4 == 0, 2, decode),
    )
    link = (ClusterId("north"), ClusterId("east"))
    bits = np.full(100, 2e9)
    bits[50] = 8e9
    return replace(
        made,
        requests=requests,
        clusters=(
            ClusterName("east", "pd"),
            ClusterName("west", "pd"),
            ClusterName("north", "prfaas"),
        ),
        link_bps={link: 10e9},
        series=replace(made.series, egress_bits={link: bits}),
        roles=(RoleUse("north", 0.5), RoleUse("east prefill", 0.4), RoleUse("west decode", 0.3)),
    )


def test_requests_count_where_they_arrived() -> None:
    east, west = summarise_pd_clusters(two_homes(), LEVEL)
    assert (east.cluster, east.requests, east.unanswered) == ("east", 50, 0)
    assert (west.cluster, west.requests, west.unanswered) == ("west", 50, 1)
    assert east.throughput_rps == pytest.approx(0.5, abs=0.02)
    assert east.goodput_rps == east.throughput_rps and west.goodput_rps == 0.0
    assert (east.ttft_mean_s, west.ttft_mean_s) == (1.0, 3.0)
    assert east.offload_fraction == pytest.approx(0.5, abs=0.02) and west.offload_fraction == 0.0
    assert east.decoded_elsewhere == 0.0
    assert west.decoded_elsewhere == pytest.approx(2 / 44, abs=0.002)
    assert (east.prefill_utilisation, east.decode_utilisation) == (0.4, None)
    assert (west.prefill_utilisation, west.decode_utilisation) == (None, 0.3)


def test_prefills_count_where_they_were_made() -> None:
    (north,) = summarise_prfaas_clusters(two_homes())
    assert (north.cluster, north.utilisation) == ("north", 0.5)
    assert north.prefills_rps == pytest.approx(0.25, abs=0.02)


def test_prefills_after_the_measured_window_do_not_count() -> None:
    """Otherwise an overloaded cluster would seem to prefill as many requests as arrive."""
    calm = two_homes()
    first = calm.requests.first_token_s.copy()
    first[60:] += 1000.0
    late = replace(calm, requests=replace(calm.requests, first_token_s=first))
    (north,) = summarise_prfaas_clusters(late)
    (link,) = summarise_links(late)
    east, _ = summarise_pd_clusters(late, LEVEL)
    assert north.prefills_rps == link.prefills_rps == pytest.approx(12 / 89)
    assert north.prefills_rps < east.throughput_rps == pytest.approx(25 / 89)


def test_the_first_plans_are_no_changes() -> None:
    made = two_homes()
    first = made.plans[0]
    assert replace(made, plans=(first, first)).plan_changes == ()
    assert replace(made, plans=(first, first, first)).plan_changes == (first,)


def test_a_link_has_its_own_requests_and_bits() -> None:
    (link,) = summarise_links(two_homes())
    assert (link.source, link.target, link.capacity_gbps) == ("north", "east", 10.0)
    assert link.prefills_rps == pytest.approx(0.25, abs=0.02)
    assert link.peak_gbps == 8.0
    assert link.gbps == pytest.approx(2.0 + 6.0 / 89, rel=1e-3)
    assert link.utilisation == pytest.approx(link.gbps / 10)
